"""What several brokers give of one batch."""

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from gspo_protocol.messages import Segment, TrainingValues, VersionRun
from gspo_protocol.messages.pieces import Pieces
from gspo_services.learner.broker.batches import Answer, BatchAnnounced
from tests.support.broker.made_batches import Made, MadeBatch, made_batch
from tests.support.learner.scripted_broker import answers_of


def a_trajectory_of(group_id: int, member: int, num_actions: int, reward: float = 0.0) -> Made:
    """Two observation tokens and ``num_actions`` action tokens; its tokens say whose it is."""
    num_tokens = 2 + num_actions
    segments = [Segment("observation", 0, 2), Segment("action", 0, num_actions)]
    return Made(
        trajectory_id=100 * group_id + member, group_id=group_id,
        token_ids=np.arange(num_tokens, dtype=np.int32) + 1000 * group_id + 100 * member,
        logprobs=np.full(num_tokens, -0.5, np.float32),
        pieces=Pieces(segments, [VersionRun(-1, 2), VersionRun(4, num_actions)], [reward]),
    )  # fmt: skip


def a_share(
    broker: int,
    *,
    num_brokers: int = 3,
    index: int = 4,
    lengths: Sequence[int] = (2, 2),
    part_tokens: int = 4,
    policy_version: int = 6,
    values: TrainingValues | None = None,
) -> MadeBatch:
    """A share of one group for each of ``lengths``, which are the action tokens of its two trajectories."""
    made = [
        a_trajectory_of(broker + num_brokers * place, member, length, float(member))
        for place, length in enumerate(lengths)
        for member in range(2)
    ]
    return made_batch(made, index=index, part_tokens=part_tokens, policy_version=policy_version, values=values)


def announced(made: MadeBatch) -> BatchAnnounced:
    return BatchAnnounced(batch=made.batch, arrays=made.arrays)


def answers_of_shares(shares: Sequence[MadeBatch]) -> list[list[Answer]]:
    return [answers_of(share) for share in shares]


def with_report(made: MadeBatch, **report: float | None) -> MadeBatch:
    return MadeBatch(batch=replace(made.batch, report=report), arrays=made.arrays, parts=made.parts)

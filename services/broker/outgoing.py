"""Leases and grades as messages: the ledger's metadata joined with the store's tokens."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from gspo_protocol.codec import Array
from gspo_protocol.messages import Grade, GroupMember, Lease, Plain
from gspo_protocol.messages.journal import journal_array
from gspo_protocol.messages.pieces import Pieces, piece_arrays
from gspo_services.broker.ledger import GrantLease
from gspo_services.broker.store import Payload

NO_TOKENS: Final = Payload(
    token_ids=np.zeros(0, "<i4"),
    logprobs=np.zeros(0, "<f4"),
    segments=[],
    version_runs=[],
    state=None,
    turn_done=False,
    turn_rewards=[],
)


def lease_message(
    grant: GrantLease, task: Plain, payload: Payload, journal: Sequence[bytes], lease_s: float
) -> tuple[Lease, dict[str, Array]]:
    """A Lease with all acknowledged tokens and entries of the journal."""
    message = Lease(
        trajectory_id=grant.trajectory_id,
        epoch=grant.epoch,
        group_id=grant.group_id,
        split=grant.split,
        evaluation_set=grant.source.partition("/")[2],
        task=task,
        seed=grant.seed,
        sampling=grant.sampling,
        lease_s=lease_s,
        num_tokens=payload.num_tokens,
        state=payload.state,
        turn_done=payload.turn_done,
        num_entries=len(journal),
    )
    pieces = Pieces(payload.segments, payload.version_runs, payload.turn_rewards)
    tokens = {"token_ids": payload.token_ids, "logprobs": payload.logprobs}
    return message, {**tokens, **piece_arrays([pieces]), **journal_array(journal)}


def grade_message(grant: GrantLease, task: Plain, payloads: Sequence[Payload]) -> tuple[Grade, dict[str, Array]]:
    """A Grade of the lease's group. ``payloads``: those of its members, in their order."""
    answers = [_of_turn(payload, row.last_turn) for row, payload in zip(grant.members, payloads, strict=True)]
    members = [
        GroupMember(num_tokens=len(answer), reward=row.reward, components=row.components)
        for row, answer in zip(grant.members, answers, strict=True)
    ]
    message = Grade(
        trajectory_id=grant.trajectory_id, epoch=grant.epoch, group_id=grant.group_id, task=task, members=members
    )
    return message, {"token_ids": np.concatenate(answers)}


def _of_turn(payload: Payload, turn: int) -> Array:
    """The tokens that the policy sampled for one turn, int32 [T]."""
    marks = [segment.kind == "action" and segment.turn == turn for segment in payload.segments]
    is_its = np.repeat(marks, [segment.num_tokens for segment in payload.segments])
    tokens: Array = payload.token_ids[is_its]
    return tokens

"""Leases and batches as messages: the ledger's metadata joined with the store's tokens."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from msgspec.structs import replace

from protocol.codec import Array
from protocol.messages import Batch, BatchItem, Lease, Plain, Segment
from protocol.messages.journal import journal_array
from protocol.messages.pieces import Pieces, piece_arrays
from services.broker.ledger import GrantLease
from services.broker.rows import BatchRow, TrajectoryRow
from services.broker.store import Payload

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
        task=task,
        seed=grant.seed,
        lease_s=lease_s,
        num_tokens=payload.num_tokens,
        state=payload.state,
        turn_done=payload.turn_done,
        num_entries=len(journal),
    )
    pieces = Pieces(payload.segments, payload.version_runs, payload.turn_rewards)
    tokens = {"token_ids": payload.token_ids, "logprobs": payload.logprobs}
    return message, {**tokens, **piece_arrays([pieces]), **journal_array(journal)}


def batch_message(
    row: BatchRow, items: Sequence[tuple[TrajectoryRow, Payload]], temperature: float
) -> tuple[Batch, dict[str, Array]]:
    """A recorded batch; the same rows give the same bytes."""
    batch_items, pieces = [], []
    for trajectory, payload in items:
        assert trajectory.finish_reason is not None, trajectory
        batch_items.append(
            BatchItem(
                trajectory.trajectory_id,
                trajectory.group_id,
                trajectory.num_tokens,
                len(payload.segments),
                len(payload.version_runs),
                len(trajectory.turn_rewards),
                trajectory.finish_reason,
            )
        )
        segments = _trained(payload.segments, trajectory.discarded_turns)
        pieces.append(Pieces(segments, payload.version_runs, trajectory.turn_rewards))
    message = Batch(index=row.index, policy_version=row.policy_version, temperature=temperature, items=batch_items)
    arrays = {
        "token_ids": np.concatenate([payload.token_ids for _, payload in items]),
        "logprobs": np.concatenate([payload.logprobs for _, payload in items]),
        **piece_arrays(pieces),
    }
    return message, arrays


def _trained(segments: list[Segment], discarded_turns: Sequence[int]) -> list[Segment]:
    """The segments as they are trained on: actions of discarded turns are context at most."""
    if not discarded_turns:
        return segments
    gone = set(discarded_turns)
    return [
        replace(segment, kind="discarded") if segment.kind == "action" and segment.turn in gone else segment
        for segment in segments
    ]

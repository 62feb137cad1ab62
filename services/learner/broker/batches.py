"""A Batch message, and the groups of numpy sequences that the trainer takes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from gspo.model.packing import TrainGroup, TrainSequence
from protocol.codec import Array
from protocol.messages import Batch, BatchItem, EndOfRun, SkipBatch

OBSERVATION_TURN: Final = -1


@dataclass(frozen=True, kw_only=True)
class BatchArrived:
    """A batch with its arrays: int32 token_ids [T] and float32 logprobs [T]."""

    batch: Batch
    arrays: dict[str, Array]


Answer = BatchArrived | SkipBatch | EndOfRun
"""What follows a BatchRequest: the batch, or that it is to be skipped, or that there is none."""


def groups_of(batch: Batch, arrays: Mapping[str, np.ndarray[Any, Any]]) -> list[TrainGroup]:
    """The batch's groups; groups and their members keep the batch's order.

    Raises: ValueError when segments or version runs do not cover a trajectory's tokens.
    """
    token_ids = arrays["token_ids"].astype(np.int64)
    logprobs = arrays["logprobs"].astype(np.float32)
    members: dict[int, list[tuple[BatchItem, TrainSequence]]] = {}
    offset = 0
    for item in batch.items:
        end = offset + item.num_tokens
        sequence = _sequence(item, token_ids[offset:end], logprobs[offset:end], batch.temperature)
        members.setdefault(item.group_id, []).append((item, sequence))
        offset = end
    return [
        TrainGroup(
            group_id=str(group_id),
            sequences=tuple(sequence for _, sequence in group),
            rewards=np.asarray([sum(item.turn_rewards) for item, _ in group], dtype=np.float64),
            turn_rewards=tuple(np.asarray(item.turn_rewards, dtype=np.float64) for item, _ in group),
        )
        for group_id, group in members.items()
    ]


def _sequence(
    item: BatchItem, token_ids: np.ndarray[Any, Any], logprobs: np.ndarray[Any, Any], temperature: float
) -> TrainSequence:
    is_action = np.repeat(
        [segment.kind == "action" for segment in item.segments], [segment.num_tokens for segment in item.segments]
    )
    turns = np.repeat([segment.turn for segment in item.segments], [segment.num_tokens for segment in item.segments])
    versions = np.repeat([run.version for run in item.version_runs], [run.num_tokens for run in item.version_runs])
    for field, covered in (("segments", len(is_action)), ("version_runs", len(versions))):
        if covered != item.num_tokens:
            raise ValueError(
                f"trajectory {item.trajectory_id}: {field} cover {covered} tokens, the trajectory has {item.num_tokens}"
            )
    return TrainSequence(
        token_ids=token_ids,
        action_mask=is_action.astype(np.bool_),
        # The engine's rounding can put a certain token's log-prob a little above 0: a message allows it, training does not.
        behaviour_logprobs=np.where(is_action, np.minimum(logprobs, 0.0), 0.0).astype(np.float32),
        versions=np.where(is_action, versions, -1).astype(np.int64),
        turn_ids=np.where(is_action, turns, OBSERVATION_TURN).astype(np.int32),
        temperature=temperature,
    )

"""A Batch message, and the groups of numpy sequences that the trainer takes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gspo.model.packing import TrainGroup, TrainSequence
from protocol.codec import Array
from protocol.messages import Batch, BatchItem, EndOfRun, SkipBatch
from protocol.messages.pieces import ACTION

OBSERVATION_TURN: Final = -1


@dataclass(frozen=True, kw_only=True)
class BatchArrived:
    """A batch with its arrays."""

    batch: Batch
    arrays: dict[str, Array]


Answer = BatchArrived | SkipBatch | EndOfRun
"""What follows a BatchRequest: the batch, or that it is to be skipped, or that there is none."""


def groups_of(batch: Batch, arrays: Mapping[str, np.ndarray[Any, Any]]) -> list[TrainGroup]:
    """The batch's groups; groups and their members keep the batch's order.

    Raises: ValueError when segments or version runs do not cover a trajectory's tokens.
    """
    members: dict[int, list[tuple[NDArray[np.float64], list[TrainSequence]]]] = {}
    for item, parts in batch.split(arrays):
        sequences = _sequences(item, parts, batch.temperature)
        members.setdefault(item.group_id, []).append((parts["turn_rewards"].astype(np.float64), sequences))
    return [
        TrainGroup(
            group_id=str(group_id),
            sequences=tuple(sequence for _, sequences in group for sequence in sequences),
            rewards=np.asarray([sum(rewards.tolist()) for rewards, _ in group], dtype=np.float64),
            turn_rewards=tuple(rewards for rewards, _ in group),
            sequences_per_episode=tuple(len(sequences) for _, sequences in group),
        )
        for group_id, group in members.items()
    ]


def _sequences(item: BatchItem, parts: Mapping[str, NDArray[Any]], temperature: float) -> list[TrainSequence]:
    """The sequences of one trajectory, whose tokens may alternate. One without any action token trains nothing."""
    kinds, turns, sequences, lengths = parts["segments"].T
    is_action = np.repeat(kinds == ACTION, lengths)
    turn_ids = np.repeat(turns, lengths)
    sequence_ids = np.repeat(sequences, lengths)
    versions = np.repeat(parts["version_runs"][:, 0], parts["version_runs"][:, 1])
    for field, covered in (("segments", len(is_action)), ("version_runs", len(versions))):
        if covered != item.num_tokens:
            raise ValueError(
                f"trajectory {item.trajectory_id}: {field} cover {covered} tokens, the trajectory has {item.num_tokens}"
            )
    whole = {
        "token_ids": parts["token_ids"].astype(np.int64),
        "action_mask": is_action,
        # The engine's rounding can put a certain token's log-prob a little above 0: a message allows it, training does not.
        "behaviour_logprobs": np.where(is_action, np.minimum(parts["logprobs"], 0.0), 0.0).astype(np.float32),
        "versions": np.where(is_action, versions, -1).astype(np.int64),
        "turn_ids": np.where(is_action, turn_ids, OBSERVATION_TURN).astype(np.int32),
    }
    if not sequence_ids.any():
        return [TrainSequence(**whole, temperature=temperature)]
    return [
        TrainSequence(**{name: array[chosen] for name, array in whole.items()}, temperature=temperature)
        for chosen in (sequence_ids == sequence for sequence in np.unique(sequence_ids[is_action]))
    ]

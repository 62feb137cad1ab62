"""The rewards of a batch's groups become advantages of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gspo.advantages import group_advantages, turn_advantages
from gspo.model.packing import TrainGroup, TrainSequence


@dataclass(frozen=True, kw_only=True)
class AdvantageSettings:
    """How rewards become advantages: the settings of these names."""

    advantage: Literal["sequence", "turn"] = "sequence"
    """One advantage per sequence from its reward, or one per turn from the rewards of that turn and all later ones."""
    normalise_by_std: bool = True
    """Divide by the group's standard deviation; False only subtracts the mean."""


def sequences_with_advantages(
    groups: Sequence[TrainGroup], settings: AdvantageSettings
) -> tuple[list[TrainSequence], Tensor]:
    """The groups' sequences in order, with their advantages, and the index of each one's group (int64 [M]).

    Raises: ValueError when turns get credit and a group has no turn rewards.
    """
    members = [sequence for group in groups for sequence in group.sequences]
    group_ids = np.repeat(np.arange(len(groups)), [len(group.sequences) for group in groups])
    if settings.advantage == "sequence":
        rewards = np.concatenate([group.rewards for group in groups])
        by_sequence = group_advantages(rewards, group_ids, normalise_std=settings.normalise_by_std)
        values = [np.full(1, value, dtype=np.float32) for value in by_sequence.advantages_M.tolist()]
        turns = [np.where(sequence.action_mask, 0, -1) for sequence in members]
    else:
        by_turn = turn_advantages(
            [rewards for group in groups for rewards in _turn_rewards(group)],
            group_ids,
            normalise_std=settings.normalise_by_std,
        )
        values = [advantages.numpy() for advantages in by_turn.advantages]
        turns = [sequence.turn_ids for sequence in members]
    trained = [
        sequence.with_advantages(_to_tokens(value, turn))
        for sequence, value, turn in zip(members, values, turns, strict=True)
    ]
    return trained, torch.from_numpy(group_ids)


def _turn_rewards(group: TrainGroup) -> Sequence[NDArray[np.float64]]:
    if group.turn_rewards is None:
        raise ValueError(f"group {group.group_id} has no turn_rewards; give them, or set advantage = 'sequence'")
    for sequence, rewards in zip(group.sequences, group.turn_rewards, strict=True):
        if sequence.turn_ids.max() >= len(rewards):
            raise ValueError(
                f"group {group.group_id}: a sequence has {sequence.turn_ids.max() + 1} turns and {len(rewards)} turn rewards"
            )
    return group.turn_rewards


def _to_tokens(values: NDArray[np.float32], turn_ids_L: NDArray[np.integer]) -> NDArray[np.float32]:
    on_actions = turn_ids_L >= 0
    advantages_L = np.zeros(turn_ids_L.shape, dtype=np.float32)
    advantages_L[on_actions] = values[turn_ids_L[on_actions]]
    return advantages_L

"""The rewards of a batch's groups become advantages of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gspo.advantages import group_advantages, turn_advantages
from gspo.model.packing import TrainGroup, TrainSequence, episode_ids
from gspo.options.overlong import overlong, overlong_penalties
from gspo.settings import Baseline, StdOver
from services.runtime.settings import Settings


@dataclass(frozen=True, kw_only=True)
class AdvantageSettings:
    """How rewards become advantages: the settings of these names."""

    advantage: Literal["sequence", "turn"] = "sequence"
    """One advantage per sequence from its reward, or one per turn from the rewards of that turn and all later ones."""
    normalise_by_std: bool = True
    """Divide by a standard deviation; False only subtracts the baseline."""
    baseline: Baseline = "mean"
    """What a reward is compared with."""
    std_over: StdOver = "group"
    """Whose deviation it is: the group's or the batch's."""
    max_tokens: int | None = None
    """The most tokens of a sequence; needed by the two below."""
    overlong_buffer_tokens: int | None = None
    """The last tokens before the limit, over which rewards fall; None: they do not."""
    overlong_penalty: float = 1.0
    """By how much they fall."""
    overlong_filter_tokens: int | None = None
    """Episodes with a sequence of this many tokens get advantage 0; None: none do."""

    @classmethod
    def of(cls, settings: Settings) -> AdvantageSettings:
        """Those of a run."""
        objective = settings.objective
        return cls(
            advantage=objective.advantage,
            normalise_by_std=objective.normalise_by_std,
            baseline=objective.advantage_baseline,
            std_over=objective.std_over,
            max_tokens=settings.sampling.max_tokens,
            overlong_buffer_tokens=objective.overlong_buffer_tokens,
            overlong_penalty=objective.overlong_penalty,
            overlong_filter_tokens=objective.overlong_filter_tokens,
        )


def sequences_with_advantages(
    groups: Sequence[TrainGroup], settings: AdvantageSettings
) -> tuple[list[TrainSequence], Tensor]:
    """The groups' sequences in order, with their advantages, and the index of each one's group (int64 [M]).

    All sequences of an episode share its advantage, or those of its turns. An episode is as long as its longest sequence.
    Raises: ValueError when turns get credit and a group has no turn rewards.
    """
    members = [sequence for group in groups for sequence in group.sequences]
    episode_of = episode_ids(groups)
    group_ids = np.repeat(np.arange(len(groups)), [group.num_episodes for group in groups])
    lengths = np.zeros(len(group_ids), dtype=np.int64)
    np.maximum.at(lengths, episode_of, [sequence.num_tokens for sequence in members])
    penalties = _penalties(lengths, settings)
    scaling: _Scaling = {
        "baseline": settings.baseline,
        "normalise_std": settings.normalise_by_std,
        "std_over": settings.std_over,
    }
    if settings.advantage == "sequence":
        rewards = np.concatenate([group.rewards for group in groups]) + penalties
        by_episode = group_advantages(rewards, group_ids, **scaling)
        values = [np.full(1, value, dtype=np.float32) for value in by_episode.advantages_M.tolist()]
        turns = [np.where(sequence.action_mask, 0, -1) for sequence in members]
    else:
        of_turns = [rewards for group in groups for rewards in _turn_rewards(group)]
        by_turn = turn_advantages([_less(*pair) for pair in zip(of_turns, penalties, strict=True)], group_ids, **scaling)
        values = [advantages.numpy() for advantages in by_turn.advantages]
        turns = [sequence.turn_ids for sequence in members]
    if settings.overlong_filter_tokens is not None:
        limit = _require_max_tokens(settings)
        filtered = overlong(lengths, max_tokens=limit, filter_tokens=settings.overlong_filter_tokens)
        values = [np.zeros_like(value) if out else value for value, out in zip(values, filtered, strict=True)]
    trained = [
        sequence.with_advantages(_to_tokens(values[episode], turn))
        for sequence, episode, turn in zip(members, episode_of.tolist(), turns, strict=True)
    ]
    return trained, torch.from_numpy(group_ids[episode_of])


class _Scaling(TypedDict):
    baseline: Baseline
    normalise_std: bool
    std_over: StdOver


def _penalties(lengths: NDArray[np.integer], settings: AdvantageSettings) -> NDArray[np.float64]:
    """What is added to the reward of each episode."""
    if settings.overlong_buffer_tokens is None:
        return np.zeros(lengths.shape[0])
    return settings.overlong_penalty * overlong_penalties(
        lengths, max_tokens=_require_max_tokens(settings), buffer_tokens=settings.overlong_buffer_tokens
    )


def _require_max_tokens(settings: AdvantageSettings) -> int:
    if settings.max_tokens is None:
        raise ValueError("max_tokens is None; give the most tokens of a trajectory, which says what is overlong")
    return settings.max_tokens


def _less(rewards: NDArray[np.float64], penalty: float) -> NDArray[np.float64]:
    """An episode's turn rewards with its penalty, which belongs to the last turn."""
    if penalty == 0 or len(rewards) == 0:
        return rewards
    return np.append(rewards[:-1], rewards[-1] + penalty)


def _turn_rewards(group: TrainGroup) -> Sequence[NDArray[np.float64]]:
    if group.turn_rewards is None:
        raise ValueError(f"group {group.group_id} has no turn_rewards; give them, or set advantage = 'sequence'")
    for sequence, episode in zip(group.sequences, episode_ids([group]).tolist(), strict=True):
        rewards = group.turn_rewards[episode]
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

"""Turns the rewards of a batch's groups into advantages of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

import numpy as np
from numpy.typing import NDArray

from gspo.advantages import TurnCredit, group_advantages, turn_advantages
from gspo.model.packing import BatchGroup, TrainSequence
from gspo.options.overlong import overlong, overlong_penalties
from gspo.settings import Baseline, Objective, StdOver
from gspo_services.learner.plan import BatchRows
from gspo_services.shared.settings import Settings


@dataclass(frozen=True, kw_only=True)
class AdvantageSettings:
    """How rewards become advantages: the settings of these names."""

    advantage: Literal["sequence", "turn", "role"] = "sequence"
    """One advantage per sequence from its reward, one per turn from the rewards of that turn and all later ones, or one per
    role from the rewards of its turns."""
    normalise_by_std: bool = True
    """Divide by a standard deviation; False only subtracts the baseline."""
    baseline: Baseline = "mean"
    """The baseline of a reward."""
    std_over: StdOver = "group"
    """Which standard deviation: the group's or the batch's."""
    max_tokens: int | None = None
    """The most tokens of a sequence, for groups without their own limit; needed by the two below."""
    overlong_buffer_tokens: int | None = None
    """The last tokens before the limit, over which rewards fall; None: they do not."""
    overlong_penalty: float = 1.0
    """By how much they fall."""
    overlong_filter_tokens: int | None = None
    """Episodes with a sequence of this many tokens get advantage 0; None: none do."""
    teacher_coefficient: float = 0.0
    """What a teacher's log-ratio counts in each token's advantage; 0: there is no teacher."""
    teacher_only: bool = False
    """It is the whole advantage, and rewards give none."""

    @classmethod
    def of(cls, settings: Settings) -> AdvantageSettings:
        """Take the settings from a run's."""
        objective, distillation = settings.objective, settings.distillation
        return cls(
            advantage=objective.advantage,
            normalise_by_std=objective.normalise_by_std,
            baseline=objective.advantage_baseline,
            std_over=objective.std_over,
            max_tokens=settings.largest_sampling.max_tokens,
            overlong_buffer_tokens=objective.overlong_buffer_tokens,
            overlong_penalty=objective.overlong_penalty,
            overlong_filter_tokens=objective.overlong_filter_tokens,
            teacher_coefficient=distillation.coefficient if distillation.teacher else 0.0,
            teacher_only=distillation.only,
        )


@dataclass(frozen=True, kw_only=True)
class AdvantageTable:
    """The advantages of a batch, from rewards and lengths alone: they reach a sequence's tokens when it is trained."""

    rows: BatchRows
    values: Sequence[NDArray[np.float32]]
    """For each episode: [1], its advantage, or that of each of its turns."""
    by_turn: bool
    filtered: NDArray[np.bool_]
    """[M]; sequences that are too long to count (``overlong_filter_tokens``): a teacher's judgement is not added either."""

    @classmethod
    def of(cls, rows: BatchRows, settings: AdvantageSettings, rewards: NDArray[np.float64] | None = None) -> AdvantageTable:
        """All sequences of an episode share its advantage, or those of its turns. An episode is as long as its longest
        sequence.

        ``rewards``: of each episode, in place of its own; rewards of turns stay what they are.

        Raises: ValueError when turns get credit and a group has no turn rewards.
        """
        groups = rows.groups
        group_ids = np.repeat(np.arange(len(groups)), [group.num_episodes for group in groups])
        lengths = np.zeros(len(group_ids), dtype=np.int64)
        np.maximum.at(lengths, rows.episode_ids, rows.lengths)
        limits = _limits(groups, settings)
        penalties = _penalties(lengths, limits, settings)
        scaling: _Scaling = {
            "baseline": settings.baseline,
            "normalise_std": settings.normalise_by_std,
            "std_over": settings.std_over,
        }
        if settings.advantage == "sequence":
            lowered = (rows.rewards if rewards is None else rewards) + penalties
            by_episode = group_advantages(lowered, group_ids, **scaling)
            values = [np.full(1, value, dtype=np.float32) for value in by_episode.advantages_M.tolist()]
        else:
            kept = [is_kept for group in groups for is_kept in _kept_turns(group)]
            of_turns = [each for group in groups for each in _turn_rewards(group)]
            of_turns = [each[is_kept] for each, is_kept in zip(of_turns, kept, strict=True)]
            of_turns = [_less(*pair) for pair in zip(of_turns, penalties, strict=True)]
            roles = [role for group in groups for role in _turn_roles(group)]
            roles = [role[is_kept] for role, is_kept in zip(roles, kept, strict=True)]
            credit: TurnCredit = "role" if settings.advantage == "role" else "return_to_go"
            by_turn = turn_advantages(of_turns, group_ids, turn_roles=roles, credit=credit, **scaling)
            values = [np.zeros(len(is_kept), dtype=np.float32) for is_kept in kept]
            for value, is_kept, advantages in zip(values, kept, by_turn.advantages, strict=True):
                value[is_kept] = advantages.numpy()
        filtered = np.zeros(len(values), dtype=np.bool_)
        if settings.overlong_filter_tokens is not None:
            # The limit may grow within a run: what only a later batch can reach is valid, and filters nothing before.
            limit = max(int(limits.max()), _require_max_tokens(settings))
            filtered = overlong(lengths, max_tokens=limit, filter_tokens=settings.overlong_filter_tokens)
            values = [np.zeros_like(value) if out else value for value, out in zip(values, filtered, strict=True)]
        return cls(rows=rows, values=values, by_turn=settings.advantage != "sequence", filtered=filtered[rows.episode_ids])

    @property
    def still(self) -> NDArray[np.bool_]:
        """[M]; sequences whose advantage is 0 at every token: nothing of them pulls at the policy."""
        return np.array([not value.any() for value in self.values], dtype=np.bool_)[self.rows.episode_ids]

    def with_advantages(self, row: int) -> TrainSequence:
        """Return the sequence at ``row`` with its tokens' advantages.

        Raises: ValueError when this rank does not have its tokens, or they have more turns than the episode has rewards.
        """
        sequence, episode = self.rows.sequences[row].loaded(), self.rows.episode_ids[row]
        values = self.values[episode]
        if not self.by_turn:
            return sequence.with_advantages(_to_tokens(values, np.where(sequence.action_mask, 0, -1)))
        num_turns = sequence.turn_ids.max() + 1
        if num_turns > len(values):
            raise ValueError(
                f"episode {episode} of the batch: a sequence has {num_turns} turns and {len(values)} turn rewards"
            )
        return sequence.with_advantages(_to_tokens(values, sequence.turn_ids))


def pulls_without_advantage(objective: Objective, advantages: AdvantageSettings) -> bool:
    """Whether a sequence of advantage 0 has a gradient: of a KL term, an entropy bonus or a teacher.

    With a KL term in the reward it is not known before the first pass whether a sequence has one. M2PO's mask is made of all
    tokens of a micro-batch: those of such sequences decide about the others.
    """
    return (
        objective.kl_coefficient > 0
        or objective.surrogate == "m2po"
        or objective.entropy_coefficient > 0
        or advantages.teacher_coefficient > 0
    )


def sequences_with_advantages(
    groups: Sequence[BatchGroup], settings: AdvantageSettings
) -> tuple[list[TrainSequence], NDArray[np.int64]]:
    """Return the groups' sequences in order, with their advantages, and the index of each one's group, [M].

    Raises: ValueError when turns get credit and a group has no turn rewards, or too few.
    """
    rows = BatchRows.of(groups)
    table = AdvantageTable.of(rows, settings)
    return [table.with_advantages(row) for row in range(len(rows.sequences))], rows.group_ids


class _Scaling(TypedDict):
    baseline: Baseline
    normalise_std: bool
    std_over: StdOver


def _limits(groups: Sequence[BatchGroup], settings: AdvantageSettings) -> NDArray[np.int64]:
    """Return each episode's most tokens of a sequence; 0 where it is unknown and unused."""
    is_needed = settings.overlong_buffer_tokens is not None or settings.overlong_filter_tokens is not None
    unknown = _require_max_tokens(settings) if is_needed and any(group.max_tokens is None for group in groups) else 0
    limits = [unknown if group.max_tokens is None else group.max_tokens for group in groups]
    return np.repeat(np.asarray(limits, dtype=np.int64), [group.num_episodes for group in groups])


def _penalties(lengths: NDArray[np.integer], limits: NDArray[np.int64], settings: AdvantageSettings) -> NDArray[np.float64]:
    """Return the amount to add to each episode's reward."""
    if settings.overlong_buffer_tokens is None:
        return np.zeros(lengths.shape[0])
    return settings.overlong_penalty * overlong_penalties(
        lengths, max_tokens=limits, buffer_tokens=settings.overlong_buffer_tokens
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


def _turn_rewards(group: BatchGroup) -> Sequence[NDArray[np.float64]]:
    if group.turn_rewards is None:
        raise ValueError(f"group {group.group_id} has no turn_rewards; give them, or set advantage = 'sequence'")
    return group.turn_rewards


def _kept_turns(group: BatchGroup) -> Sequence[NDArray[np.bool_]]:
    """All but those of attempts that began again: these have no reward of their own, and would move the others' places."""
    if group.turn_discarded is None:
        return [np.ones(len(rewards), dtype=np.bool_) for rewards in _turn_rewards(group)]
    return [~discarded for discarded in group.turn_discarded]


def _turn_roles(group: BatchGroup) -> Sequence[NDArray[np.int64]]:
    if group.turn_roles is None:
        return [np.zeros(len(rewards), dtype=np.int64) for rewards in _turn_rewards(group)]
    return group.turn_roles


def _to_tokens(values: NDArray[np.float32], turn_ids_L: NDArray[np.integer]) -> NDArray[np.float32]:
    on_actions = turn_ids_L >= 0
    advantages_L = np.zeros(turn_ids_L.shape, dtype=np.float32)
    advantages_L[on_actions] = values[turn_ids_L[on_actions]]
    return advantages_L

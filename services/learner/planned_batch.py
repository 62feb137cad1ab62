"""Makes of a batch's groups one object that can be trained: its steps, packed with their advantages, for this rank.

Every rank knows rewards and lengths of the whole batch, and has the tokens of its share of it, by a plan that all ranks
compute alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, Protocol, overload

import numpy as np

from gspo.model.packing import BatchGroup, PackedBatch, pack
from gspo.settings import Objective
from gspo_services.learner.advantages import AdvantageSettings, AdvantageTable, pulls_without_advantage
from gspo_services.learner.kl_rewards import ReferenceEngine, kl_penalties
from gspo_services.learner.plan import BatchRows, RankBudget, StepPlan, own_micro_batches, planned_steps
from gspo_services.learner.profiling import Phases, PlannedWork
from gspo_services.shared.settings import Settings

KEPT_TOKENS: Final = 2**21
"""Micro-batches of up to this many tokens of a step are packed at once and kept: 128 MB. Larger ones are packed when they
are used, and forgotten."""


class PlanningEngine(ReferenceEngine, RankBudget, Protocol):
    """The methods of an engine that the plan of a batch needs."""

    @property
    def profile(self) -> Phases: ...


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """How a run's batches are planned: the settings of these names."""

    mini_batches: int = 1
    """Optimizer steps of a batch; each has whole groups, and the batch's mix of lags (see ``deal_in_turn``), so that the
    first one is a fair sample of the batch. A batch of fewer groups has a step for each group."""
    max_lag: int | None = None
    """The oldest token that may be trained on, in versions; None for any. The broker enforces it by admission, and assembles
    no batch with an older token. The check here is the last one before training."""
    advantages: AdvantageSettings = field(default_factory=AdvantageSettings)
    balances_load: bool = False
    """A loss balances the experts, so that every sequence has a gradient."""

    @classmethod
    def of(cls, settings: Settings) -> BatchSettings:
        """Take the settings from a run's."""
        return cls(
            mini_batches=settings.batch.mini_batches,
            max_lag=settings.batch.max_lag,
            advantages=AdvantageSettings.of(settings),
            balances_load=settings.objective.load_balance_coefficient > 0,
        )


@dataclass(frozen=True)
class MiniBatch:
    """One optimizer step: its plan, and this rank's share of it."""

    plan: StepPlan
    micro_batches: Sequence[PackedBatch]
    """[len(plan.own)]; their ``sequence_indices`` are rows of the batch."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedBatch:
    """A batch as this rank trains it. All but the micro-batches and the numbers of their tokens is alike on every rank."""

    policy_version: int
    """That of the engine's weights before the batch; lags are counted from it."""
    objective: Objective
    """The plan depends on it, so the batch is trained with no other."""
    advantages: AdvantageSettings
    credit: AdvantageTable
    """With the rows of the batch, on every rank."""
    mini_batches: Sequence[MiniBatch]
    kl_penalty: float | None
    """By how much the KL term lowers an episode's reward, in the mean; None: rewards have none."""

    @property
    def rows(self) -> BatchRows:
        return self.credit.rows

    def micro_batches(self) -> Iterator[PackedBatch]:
        """Those of all steps."""
        return chain.from_iterable(mini_batch.micro_batches for mini_batch in self.mini_batches)

    def work(self, *, sequence_parallel: int, first_pass: bool) -> PlannedWork:
        """Return what the batch is to be, for a profile."""
        plans = [mini_batch.plan for mini_batch in self.mini_batches]
        return PlannedWork(
            lengths=self.rows.lengths,
            still_lengths=[length for plan in plans for length in plan.still_lengths],
            own_tokens=sum(plan.own_tokens for plan in plans) // sequence_parallel,
            num_micro_batches=sum(len(plan.own) for plan in plans),
            first_pass=first_pass,
        )


def plan_batch(
    engine: PlanningEngine,
    groups: Sequence[BatchGroup],
    policy_version: int,
    objective: Objective,
    settings: BatchSettings,
) -> PlannedBatch:
    """Compute advantages, steps and micro-batches of a batch. Collective where the objective has a KL term in the reward.

    Args:
        groups: the same on every rank, which has the tokens of the sequences at ``rows_of_rank``.
        policy_version: the version of the engine's weights before the batch.

    Raises: ValueError, on all ranks alike, when the batch cannot be planned, and on this one for tokens that it cannot pack;
        NonFiniteLossError, on all ranks alike, for a KL term that is not finite.
    """
    if settings.max_lag is not None:
        _require_max_lag(groups, policy_version, settings.max_lag)
    with engine.profile.phase("prepare"):
        plan = _planned(engine, groups, policy_version, objective, settings)
    credit, kl_penalty = plan.credit, None
    if plan.whole is not None:
        rewards = credit.rows.rewards
        with engine.profile.phase("first_pass"):
            lower = rewards - kl_penalties(engine, credit.rows, plan.whole, objective, policy_version=policy_version)
        kl_penalty = float((rewards - lower).mean())
        credit = AdvantageTable.of(credit.rows, settings.advantages, lower)
    with engine.profile.phase("prepare"):
        return PlannedBatch(
            policy_version=policy_version,
            objective=objective,
            advantages=settings.advantages,
            credit=credit,
            mini_batches=[MiniBatch(step, _packed(engine, credit, step, policy_version)) for step in plan.steps],
            kl_penalty=kl_penalty,
        )


def rows_of_rank(
    engine: RankBudget, settings: Settings, groups: Sequence[BatchGroup], policy_version: int
) -> frozenset[int]:
    """The sequences of a batch, by their rows in it, of which this rank needs the tokens: those that it trains in one of
    the steps, and those that a pass over the whole batch before the first step gives to it.

    ``groups`` and ``policy_version``: those of the batch; of the groups, lengths and rewards are read, and no tokens.
    Raises: ValueError, on all ranks alike, when the batch cannot be planned.
    """
    plan = _planned(engine, groups, policy_version, settings.objective, BatchSettings.of(settings))
    return frozenset(row for members in (*(plan.whole or ()), *chain(*(step.own for step in plan.steps))) for row in members)


@dataclass(frozen=True)
class _Plan:
    """Which rows of a batch this rank has where: from lengths and rewards as they came, so that it is known before tokens
    come and stays the same when a KL term lowers the rewards, because then every sequence has a gradient."""

    credit: AdvantageTable
    """Of the rewards as they came."""
    steps: Sequence[StepPlan]
    whole: Sequence[Sequence[int]] | None
    """The rows of each micro-batch of a pass over the whole batch before the first step; None: there is none."""


def _planned(
    engine: RankBudget, groups: Sequence[BatchGroup], policy_version: int, objective: Objective, settings: BatchSettings
) -> _Plan:
    """Raises: ValueError, on all ranks alike, when the batch cannot be planned."""
    rows = BatchRows.of(groups)
    credit = AdvantageTable.of(rows, settings.advantages)
    all_pull = settings.balances_load or pulls_without_advantage(objective, settings.advantages)
    still = np.zeros(len(rows.sequences), dtype=np.bool_) if all_pull else credit.still
    steps = planned_steps(engine, rows, still, policy_version, settings.mini_batches)
    is_passed = objective.kl_coefficient > 0 and objective.kl_in == "reward"
    whole = own_micro_batches(engine, rows.lengths, rows.group_ids.tolist()) if is_passed else None
    return _Plan(credit=credit, steps=steps, whole=whole)


def _require_max_lag(groups: Sequence[BatchGroup], policy_version: int, max_lag: int) -> None:
    # Over the whole batch, so that all ranks raise together: one alone would leave the others waiting.
    for group in groups:
        for index, sequence in enumerate(group.sequences):
            oldest = sequence.oldest_version
            if oldest is not None and policy_version - oldest > max_lag:
                raise ValueError(
                    f"group {group.group_id}: sequence {index} has a token of version {oldest}, which is "
                    f"{policy_version - oldest} versions old, and max_lag is {max_lag}: the broker must not assemble it"
                )


def _packed(engine: RankBudget, credit: AdvantageTable, step: StepPlan, policy_version: int) -> Sequence[PackedBatch]:
    """Return this rank's micro-batches of a step: packed at once if they are small."""

    def pack_own(members: Sequence[int]) -> PackedBatch:
        own = [credit.with_advantages(row) for row in members]
        shared = credit.rows.families(members) if engine.shares_beginnings else None
        return pack(own, policy_version=policy_version, sequence_indices=members, families=shared)

    later = PackedLater(step.own, pack_own)
    return later if step.own_tokens > KEPT_TOKENS else list(later)


class PackedLater(Sequence[PackedBatch]):
    """Micro-batches that are packed each time they are used, so that only one of them takes memory."""

    def __init__(self, members: Sequence[Sequence[int]], pack: Callable[[Sequence[int]], PackedBatch]) -> None:
        self._members = members
        self._pack = pack

    def __len__(self) -> int:
        return len(self._members)

    @overload
    def __getitem__(self, index: int) -> PackedBatch: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[PackedBatch]: ...
    def __getitem__(self, index: int | slice) -> PackedBatch | Sequence[PackedBatch]:
        if isinstance(index, slice):
            return PackedLater(self._members[index], self._pack)
        return self._pack(self._members[index])

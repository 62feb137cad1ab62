"""Trains one batch of whole groups: mini-batches, loss, mismatch and diagnostics.

Every rank knows rewards and lengths of the whole batch, and has the tokens of its share of it, by a plan that all ranks
compute alike. Only gradients and a table of statistics cross between ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Protocol

import numpy as np
import structlog
import torch
from torch import Tensor

from gspo.adaptive import AdaptiveClip
from gspo.calibration import Calibration, LagCalibration, measured_sequences
from gspo.diagnostics import SequenceStats, signal_clip_fraction, summarise
from gspo.inputs.validation import trusted_values
from gspo.loss import objective_loss
from gspo.mismatch import MismatchMoments, MismatchTracker, mismatch_sums
from gspo.model.logprobs import TokenLogProbs
from gspo.model.packing import BatchGroup, BatchSequence, PackedBatch, episode_ids
from gspo.moe.experts import ExpertPicks, ExpertShape, ExpertTally
from gspo.options.ess_rate import ess_rate_scale
from gspo.settings import Objective
from gspo.staleness import sequence_lag
from gspo_services.learner.advantages import AdvantageSettings, AdvantageTable, pulls_without_advantage
from gspo_services.learner.distillation import Distillation, TeacherEngine, with_teacher_kl
from gspo_services.learner.engine import LearnerEngine, LossFn, NonFiniteLossError, ReplayFn, StepResult
from gspo_services.learner.kl_rewards import ReferenceEngine, with_kl_rewards
from gspo_services.learner.plan import (
    MINI_BATCH_ORDER,
    MiniBatch,
    gathered_over_sequences,
    planned_mini_batches,
    sum_over_sequences,
)
from gspo_services.learner.profiling import NO_PROFILE, Phases, PlannedWork
from gspo_services.learner.token_dump import TokenDump

log = structlog.get_logger()


class TrainingEngine(ReferenceEngine, TeacherEngine, Protocol):
    """The methods of an engine that the trainer needs."""

    @property
    def replays_routing(self) -> bool: ...
    @property
    def engine_experts(self) -> ExpertShape | None: ...
    @property
    def balances_load(self) -> bool: ...
    def train_mini_batch(
        self,
        micro_batches: Sequence[PackedBatch],
        loss_fn: LossFn,
        *,
        num_still: int = 0,
        replay: ReplayFn | None = None,
        rate_scale: Callable[[], float] | None = None,
    ) -> StepResult: ...


@dataclass(frozen=True, kw_only=True)
class BatchReport:
    """The metrics of one trained batch; the same on every rank."""

    metrics: dict[str, float]
    """By name; those of ``gspo.diagnostics.summarise`` and ``gspo.moe.experts`` by "name/bucket"."""


class TrainBatch(Protocol):
    """``train_batch``, or what stands in for it where there is no model."""

    def __call__(
        self,
        engine: LearnerEngine,
        groups: Sequence[BatchGroup],
        *,
        objective: Objective,
        policy_version: int,
        num_mini_batches: int,
        mismatch: MismatchTracker,
        adaptive_clip: AdaptiveClip | None = None,
        calibration: LagCalibration | None = None,
        max_lag: int | None = None,
        advantages: AdvantageSettings | None = None,
        token_dump: TokenDump | None = None,
    ) -> BatchReport: ...


def train_batch(
    engine: TrainingEngine,
    groups: Sequence[BatchGroup],
    *,
    objective: Objective,
    policy_version: int,
    num_mini_batches: int,
    mismatch: MismatchTracker,
    adaptive_clip: AdaptiveClip | None = None,
    calibration: LagCalibration | None = None,
    max_lag: int | None = None,
    advantages: AdvantageSettings | None = None,
    profile: Phases = NO_PROFILE,
    token_dump: TokenDump | None = None,
) -> BatchReport:
    """Make ``num_mini_batches`` optimizer steps on the groups. Collective.

    With an engine that replays routing, every forward pass of the batch uses the experts chosen at its start, or those
    that the inference engine chose.

    Args:
        groups: the same on every rank, which has the tokens of the sequences at ``rows_of_rank``.
        policy_version: the version of the engine's weights before the batch; lags are counted from it.
        num_mini_batches: at most the number of groups; each mini-batch has whole groups, and the batch's mix of lags
            (see ``deal_in_turn``), so that the first one is a fair sample for ``mismatch`` and ``calibration``.
        mismatch: updated from the first forward pass of the batch, the same on every rank.
        adaptive_clip: scales the batch's clip ranges, and is then updated from its clip fraction; None: no scale.
        calibration: gives the batch's calibrated clip ranges and weights, and is then updated from the sequences that were
            seen under the batch's starting weights; None: a new one.
        max_lag: the oldest token that may be trained on, in versions; None for any. The broker enforces it by admission,
            and assembles no batch with an older token. This check is the last one before training.
        advantages: None for the defaults.
        profile: told the batch's contents and where its time goes.
        token_dump: told what the loss made of each token, and written; None: that is not kept.

    Raises: ValueError when the batch cannot be trained on; GradientError (see the engine) when a step was not made.
    """
    if max_lag is not None:
        _require_max_lag(groups, policy_version, max_lag)
    advantages = AdvantageSettings() if advantages is None else advantages
    rewards = np.concatenate([group.rewards for group in groups])
    kl_metrics: dict[str, float] = {}
    if objective.kl_coefficient > 0 and objective.kl_in == "reward":
        with profile.phase("first_pass"):
            groups = with_kl_rewards(engine, groups, objective, policy_version=policy_version)
        kl_metrics["kl_penalty"] = float((rewards - np.concatenate([group.rewards for group in groups])).mean())
    with profile.phase("prepare"):
        credit = AdvantageTable.of(groups, advantages)
        sequences = credit.sequences
        pulls = pulls_without_advantage(objective, advantages, balances_load=engine.balances_load)
        mini_batches = planned_mini_batches(
            engine, groups, credit, policy_version, num_mini_batches, pulls_without_advantage=pulls
        )
    clip_scale = 1.0 if adaptive_clip is None else adaptive_clip.scale
    calibration = LagCalibration() if calibration is None else calibration
    episodes = _episodes(groups, sequences)
    teacher = Distillation(engine, advantages, clamp=objective.log_ratio_clamp, filtered_M=credit.filtered)
    with profile.phase("first_pass"):
        teacher.begin(chain.from_iterable(mini_batch.micro_batches for mini_batch in mini_batches))
    run = _BatchRun(
        engine, objective, policy_version, mismatch, clip_scale, calibration.current, credit.group_ids, episodes, teacher,
        token_dump,
    )  # fmt: skip
    work = PlannedWork(
        lengths=[sequence.num_tokens for sequence in sequences],
        still_lengths=[length for part in mini_batches for length in part.still_lengths],
        own_tokens=sum(part.own_tokens for part in mini_batches) // engine.sequence_parallel,
        num_micro_batches=sum(len(part.micro_batches) for part in mini_batches),
        first_pass=run.needs_first_pass,
    )
    profile.planned(work)
    run.require_reported(mini_batches)
    if run.needs_first_pass:
        with profile.phase("first_pass"):
            run.first_pass(mini_batches)
    steps = [run.step(mini_batch, is_first=index == 0) for index, mini_batch in enumerate(mini_batches)]
    metrics = {
        "loss": sum(step.loss for step in steps) / len(steps),
        "grad_norm": sum(step.grad_norm for step in steps) / len(steps),
        "grad_norm_max": max(step.grad_norm for step in steps),
        "learning_rate": steps[-1].learning_rate,
        "packed_tokens": float(sum(step.num_tokens for step in steps)),
        "computed_tokens": float(sum(step.num_computed_tokens for step in steps)),
        "forward_only_tokens": float(sum(work.still_lengths)),
        "optimizer_steps": float(len(steps)),
        "mini_batch_order": float(MINI_BATCH_ORDER),
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "mismatch_sigma": mismatch.sigma,
        "clip_scale": clip_scale,
        **kl_metrics,
        **run.rate_metrics(),
    }
    with profile.phase("diagnostics"):
        stats = run.gathered_stats()
        if token_dump is not None:
            token_dump.write()
        summary = summarise(stats)
        # With the proximal anchor every sequence was seen under the starting weights, else those of the first step.
        seen = mini_batches if objective.needs_proximal_logprobs else mini_batches[:1]
        calibration.update(measured_sequences(stats, [row for mini_batch in seen for row in mini_batch.rows]))
        fraction = signal_clip_fraction(summary)
        if adaptive_clip is not None and fraction is not None:
            adaptive_clip.update(fraction)
        metrics |= summary | calibration.metrics() | _biases(objective, calibration, summary)
        experts = run.expert_metrics()
        if experts.get("experts_replayed/all") == 0:
            log.warning(
                "no_experts_reported", policy_version=policy_version,
                remedy='give broker and rollouts objective.routing_replay_from = "engine" too; older groups have none',
            )  # fmt: skip
        return BatchReport(metrics=metrics | experts | run.auxiliary_metrics(len(steps)))


def _biases(objective: Objective, calibration: LagCalibration, summary: Mapping[str, float]) -> dict[str, float]:
    """``calibration_bias`` by lag: the location of what engine and drift add to the log-ratios, over the clip range's bound
    on that side. Above 1, more than half of the sequences of that lag lie beyond it before anything is learned."""
    if objective.anchor != "behaviour":
        return {}
    found = {}
    for key, location in calibration.metrics().items():
        name, _, bucket = key.partition("/")
        bound = summary.get(f"clip_range_{'low' if location < 0 else 'high'}/{bucket}", 0.0)
        if name == "calibration_location" and bound:
            found[f"calibration_bias/{bucket}"] = location / bound
    return found


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


@dataclass(frozen=True)
class _Episodes:
    """For each sequence of the batch, [M]: its episode, and n_i, the action tokens of all sequences of that episode."""

    ids: Tensor
    num_tokens: Tensor
    have_several: bool
    """Some episode has several sequences; otherwise the loss counts by itself."""


def _episodes(groups: Sequence[BatchGroup], sequences: Sequence[BatchSequence]) -> _Episodes:
    ids = episode_ids(groups)
    per_episode = np.bincount(ids, weights=[sequence.num_action_tokens for sequence in sequences])
    several = len(per_episode) < len(sequences)
    return _Episodes(torch.from_numpy(ids), torch.from_numpy(per_episode[ids].astype(np.float32)), several)


class _BatchRun:
    """The steps of one batch, and the statistics that they leave."""

    def __init__(
        self,
        engine: TrainingEngine,
        objective: Objective,
        policy_version: int,
        mismatch: MismatchTracker,
        clip_scale: float,
        calibration: Calibration,
        group_ids: Tensor,
        episodes: _Episodes,
        teacher: Distillation,
        token_dump: TokenDump | None,
    ) -> None:
        self._engine = engine
        self._objective = objective
        self._policy_version = policy_version
        self._mismatch = mismatch
        self._clip_scale = clip_scale
        self._calibration = calibration
        self._group_ids = group_ids
        self._episodes = episodes
        self._teacher = teacher
        self._token_dump = token_dump
        self._num_steps = 0
        self._rate_scales: list[float] = []
        self._rows: list[Tensor] = []
        self._stats: list[SequenceStats] = []
        self._proximal: dict[tuple[int, ...], Tensor] = {}
        """Keyed by the rows of a micro-batch's sequences in the batch."""
        self._auxiliary: list[Tensor] = []
        self._shape = engine.engine_experts
        self._experts = ExpertTally(compares=self._shape is not None)
        self._start_experts: dict[tuple[int, ...], ExpertPicks] = {}
        """The experts of the first pass, until the micro-batch is trained: layers x k x 1 or 2 bytes per token."""

    @property
    def needs_first_pass(self) -> bool:
        """Whether log-probs or experts of the batch's starting weights are used after the first step."""
        return self._objective.needs_proximal_logprobs or self._engine.replays_routing

    def first_pass(self, mini_batches: Sequence[MiniBatch]) -> None:
        """Compute the learner's own log-probs and experts at the start of the batch, on the code path of the update.

        Raises: ValueError, on all ranks alike, when experts are to be replayed and the model's cannot be recorded.
        """
        sums: list[Tensor] = []
        for index, mini_batch in enumerate(mini_batches):
            for packed in mini_batch.micro_batches:
                result = self._engine.logprobs(packed)
                if self._engine.replays_routing and result.experts is None:
                    raise ValueError(
                        "this model's router choices cannot be recorded, so they cannot be replayed; set "
                        "objective.routing_replay = false"
                    )
                if packed.is_empty:
                    continue
                rows, logprobs_T = _rows(mini_batch, packed), result.logprobs_T
                if self._objective.needs_proximal_logprobs:
                    self._proximal[rows] = logprobs_T
                # The first mini-batch is trained with these weights: nothing can change.
                if index > 0 and result.experts is not None and self._shape is None:
                    self._start_experts[rows] = result.experts
                sums.append(self._mismatch_sums(packed.to(logprobs_T.device), logprobs_T))
        self._update_mismatch(sums)

    def step(self, mini_batch: MiniBatch, *, is_first: bool) -> StepResult:
        sigma = self._mismatch.sigma
        measures_mismatch = is_first and not self.needs_first_pass
        sums: list[Tensor] = []

        def loss_fn(packed: PackedBatch, result: TokenLogProbs) -> Tensor:
            if measures_mismatch:
                # The weights are still those of the batch's start: no separate forward pass is needed.
                sums.append(self._mismatch_sums(packed, result.logprobs_T))
            # Values were checked when the sequences were made, and the engine checks log-probs. Here each check would make
            # the host wait for the device in every micro-batch, and one rank would raise alone.
            with trusted_values():
                return self._loss(mini_batch, packed, result, sigma, is_first=is_first)

        def start_experts(packed: PackedBatch) -> ExpertPicks | None:
            return self._start_experts.get(_rows(mini_batch, packed))

        replay = start_experts if self._engine.replays_routing else None
        num_before = len(self._rows)

        def rate_scale() -> float:
            """By the weights of the whole step's sequences, which every rank then knows."""
            table = self._gathered(num_before)
            # With the proximal anchor the mismatch is that of the batch's start, and the log-ratio what its steps moved.
            moved_S = table.log_ratio_S if self._objective.anchor == "proximal" else 0.0
            log_weights = ((table.mismatch_S + moved_S) * table.num_tokens_S).double()
            scale = ess_rate_scale(log_weights[list(mini_batch.rows)])
            self._rate_scales.append(scale)
            return scale

        by_ess = rate_scale if self._objective.learning_rate_by_ess else None
        with self._teacher.named():
            step = self._engine.train_mini_batch(
                mini_batch.micro_batches, loss_fn, num_still=mini_batch.num_still, replay=replay, rate_scale=by_ess
            )
        self._num_steps += 1
        if measures_mismatch:
            self._update_mismatch(sums)
        return step

    def require_reported(self, mini_batches: Sequence[MiniBatch]) -> None:
        """Raises: ValueError when an engine reported other experts than this model has. Before the batch's first step."""
        for packed in (packed for mini_batch in mini_batches for packed in mini_batch.micro_batches):
            if self._shape is not None and packed.experts_TLK is not None:
                self._shape.require(packed.experts_TLK)

    def gathered_stats(self) -> SequenceStats:
        """Return the statistics of the whole batch's sequences, in their order. Collective."""
        return self._gathered(0)

    def _gathered(self, first: int) -> SequenceStats:
        """Of the micro-batches from this rank's ``first`` on. Collective."""
        rows = torch.cat([torch.zeros(0, dtype=torch.int64), *self._rows[first:]])
        own = SequenceStats.merge(self._stats[first:]).as_matrix()
        return SequenceStats.from_matrix(gathered_over_sequences(self._engine, len(self._group_ids), rows, own))

    def expert_metrics(self) -> dict[str, float]:
        """Load and changes of the experts over the whole batch; empty for a dense model. Collective."""
        return self._experts.metrics(partial(sum_over_sequences, self._engine))

    def _loss(
        self, mini_batch: MiniBatch, packed: PackedBatch, result: TokenLogProbs, sigma: float, *, is_first: bool
    ) -> Tensor:
        rows = _rows(mini_batch, packed)
        chosen = torch.tensor(rows)
        packed, teacher_T = self._teacher.credited(packed, chosen)
        several = self._episodes.have_several

        def uploaded(values_M: Tensor) -> Tensor:
            return values_M[chosen].to(packed.mask_T.device, non_blocking=True)

        lag_S = sequence_lag(
            self._policy_version, packed.versions_T, packed.mask_T, packed.sequence_ids_T, packed.num_sequences
        )
        output = objective_loss(
            self._objective,
            result.logprobs_T,
            packed.behaviour_T,
            packed.advantages_T,
            packed.mask_T,
            packed.sequence_ids_T,
            packed.turn_ids_T,
            lag_S=lag_S,
            sigma=sigma,
            num_sequences=mini_batch.num_episodes,
            episode_ids_S=uploaded(self._episodes.ids) if several else None,
            tokens_per_sequence_S=uploaded(self._episodes.num_tokens) if several else None,
            num_tokens=mini_batch.num_action_tokens if self._objective.aggregation == "token" else None,
            clip_scale=self._clip_scale,
            calibration=self._calibration,
            proximal_logprobs_T=self._proximal[rows] if self._objective.needs_proximal_logprobs else None,
            reference_logprobs_T=self._engine.reference_logprobs(packed)
            if self._objective.needs_reference_logprobs
            else None,
            entropy_T=result.entropies_T,
            group_ids_S=uploaded(self._group_ids),
            with_tokens=self._token_dump is not None,
        )
        if self._token_dump is not None:
            self._token_dump.add(rows, self._num_steps, packed, result, self._proximal.get(rows), output)
        self._rows.append(chosen)
        self._stats.append(with_teacher_kl(output.stats, packed, teacher_T))
        if result.experts is not None:
            reference = self._start_experts.pop(rows, None)
            self._experts.add(result.experts, packed.mask_T, packed.sequence_ids_T, lag_S, reference=reference)
        if is_first and self._shape is not None:
            self._experts.compare(result.own_experts, packed.experts_TLK, packed.mask_T, packed.sequence_ids_T, lag_S)
        if result.balance_loss is None:
            return output.loss
        # A mean over the step's tokens, whose shares are those of its micro-batches.
        auxiliary = result.balance_loss * (packed.num_tokens / mini_batch.num_tokens)
        self._auxiliary.append(auxiliary.detach().double())
        return output.loss + auxiliary

    def auxiliary_metrics(self, num_steps: int) -> dict[str, float]:
        """Return the mean over steps of the load-balancing loss; empty without one. Collective where there is one."""
        if not self._engine.balances_load:
            return {}
        own = torch.stack(self._auxiliary).sum() if self._auxiliary else torch.zeros((), dtype=torch.float64)
        return {"load_balancing_loss": float(sum_over_sequences(self._engine, own)) / num_steps}

    def rate_metrics(self) -> dict[str, float]:
        """The mean factor of the learning rate by effective sample size; empty without one."""
        if not self._rate_scales:
            return {}
        return {"learning_rate_scale": sum(self._rate_scales) / len(self._rate_scales)}

    def _mismatch_sums(self, packed: PackedBatch, logprobs_T: Tensor) -> Tensor:
        with trusted_values():
            return mismatch_sums(
                logprobs_T.detach(), packed.behaviour_T, packed.mask_T, packed.versions_T, self._policy_version
            )

    def _update_mismatch(self, sums: Sequence[Tensor]) -> None:
        own = torch.stack(list(sums)).sum(dim=0) if sums else torch.zeros(3, dtype=torch.float64)
        moments = MismatchMoments.from_tensor(sum_over_sequences(self._engine, own))
        if not math.isfinite(moments.total_of_squares):
            raise NonFiniteLossError("some log-probs of the batch's start are not finite; no step was made")
        self._mismatch.update(moments)


def _rows(mini_batch: MiniBatch, packed: PackedBatch) -> tuple[int, ...]:
    return tuple(mini_batch.rows[index] for index in packed.sequence_indices)

"""The optimizer steps of one batch on one rank, and the statistics that they leave.

Only gradients and a table of statistics cross between ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gspo.adaptive import AdaptiveClip
from gspo.calibration import LagCalibration
from gspo.diagnostics import SequenceStats
from gspo.inputs.validation import trusted_values
from gspo.loss import objective_loss
from gspo.mismatch import MismatchMoments, MismatchTracker, mismatch_sums
from gspo.model.logprobs import TokenLogProbs
from gspo.model.packing import PackedBatch
from gspo.moe.experts import ExpertPicks, ExpertShape, ExpertTally
from gspo.options.ess_rate import ess_rate_scale
from gspo.staleness import sequence_lag
from gspo_services.learner.distillation import Distillation, TeacherEngine, with_teacher_kl
from gspo_services.learner.engine import LossFn, NonFiniteLossError, ReplayFn, StepResult
from gspo_services.learner.first_look import FirstLook
from gspo_services.learner.planned_batch import MiniBatch, PlannedBatch, PlanningEngine
from gspo_services.learner.sums import gathered_over_sequences, sum_over_sequences
from gspo_services.learner.token_dump import TokenDump


class TrainingEngine(PlanningEngine, TeacherEngine, Protocol):
    """The methods of an engine that the trainer needs."""

    @property
    def balances_load(self) -> bool: ...
    @property
    def replays_routing(self) -> bool: ...
    @property
    def engine_experts(self) -> ExpertShape | None: ...
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
class Trackers:
    """What the batches of a run measure for later ones: each batch updates them, the same on every rank."""

    mismatch: MismatchTracker = field(default_factory=MismatchTracker)
    """Updated from the first forward pass of a batch."""
    calibration: LagCalibration = field(default_factory=LagCalibration)
    """Gives a batch's calibrated clip ranges and weights, and is then updated from the sequences that were seen under the
    batch's starting weights."""
    adaptive_clip: AdaptiveClip | None = None
    """Scales a batch's clip ranges, and is then updated from its clip fraction; None: no scale."""

    first_look: FirstLook | None = None
    """Refuses a first batch that engines sampled otherwise; None: any is trained on."""

    @property
    def clip_scale(self) -> float:
        return 1.0 if self.adaptive_clip is None else self.adaptive_clip.scale


class BatchRun:
    """One batch: ``begin``, then ``step`` for each of its mini-batches in order, then the statistics of all."""

    def __init__(
        self, engine: TrainingEngine, batch: PlannedBatch, trackers: Trackers, token_dump: TokenDump | None
    ) -> None:
        """``trackers`` are read; of them only the mismatch is updated."""
        self._engine = engine
        self._batch = batch
        self._objective = batch.objective
        self._mismatch = trackers.mismatch
        self._first_look = None if trackers.mismatch.has_measured else trackers.first_look
        self._clip_scale = trackers.clip_scale
        self._calibration = trackers.calibration.current
        self._token_dump = token_dump
        self._teacher = Distillation(
            engine, batch.advantages, clamp=batch.objective.log_ratio_clamp, filtered_M=batch.credit.filtered
        )
        self._group_ids = torch.from_numpy(batch.rows.group_ids)
        self._episodes = _Episodes.of(batch)
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

    def begin(self) -> None:
        """Make the teacher's scores, and the learner's own log-probs and experts at the start of the batch, on the code path
        of the update. Collective.

        Raises: ValueError when an engine reported other experts than this model has, and, on all ranks alike, when experts
            are to be replayed and the model's cannot be recorded; TeacherError.
        """
        self._teacher.begin(self._batch.micro_batches())
        if self._shape is not None:
            for packed in self._batch.micro_batches():
                if packed.experts_TLK is not None:
                    self._shape.require(packed.experts_TLK)
        if self.needs_first_pass:
            self._first_pass()

    def _first_pass(self) -> None:
        sums: list[Tensor] = []
        for index, mini_batch in enumerate(self._batch.mini_batches):
            for packed in mini_batch.micro_batches:
                result = self._engine.logprobs(packed)
                if self._engine.replays_routing and result.experts is None:
                    raise ValueError(
                        "this model's router choices cannot be recorded, so they cannot be replayed; set "
                        "objective.routing_replay = false"
                    )
                if packed.is_empty:
                    continue
                rows, logprobs_T = packed.sequence_indices, result.logprobs_T
                if self._objective.needs_proximal_logprobs:
                    self._proximal[rows] = logprobs_T
                # The first mini-batch is trained with these weights: nothing can change.
                if index > 0 and result.experts is not None and self._shape is None:
                    self._start_experts[rows] = result.experts
                sums.append(self._mismatch_sums(packed.to(logprobs_T.device), logprobs_T))
        self._update_mismatch(sums)

    def step(self, mini_batch: MiniBatch) -> StepResult:
        """Make the optimizer step of the next mini-batch. Collective. Raises: GradientError (see the engine)."""
        sigma, is_first = self._mismatch.sigma, self._num_steps == 0
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
            return self._start_experts.get(packed.sequence_indices)

        replay = start_experts if self._engine.replays_routing else None
        num_before = len(self._rows)

        def rate_scale() -> float:
            """By the weights of the whole step's sequences, which every rank then knows."""
            table = self._gathered(num_before)
            # With the proximal anchor the mismatch is that of the batch's start, and the log-ratio what its steps moved.
            moved_S = table.log_ratio_S if self._objective.anchor == "proximal" else 0.0
            log_weights = ((table.mismatch_S + moved_S) * table.num_tokens_S).double()
            scale = ess_rate_scale(log_weights[list(mini_batch.plan.rows)])
            self._rate_scales.append(scale)
            return scale

        by_ess = rate_scale if self._objective.learning_rate_by_ess else None

        def before_the_step() -> float:
            self._update_mismatch(sums)
            return 1.0 if by_ess is None else by_ess()

        looks = measures_mismatch and self._first_look is not None
        with self._teacher.named():
            step = self._engine.train_mini_batch(
                mini_batch.micro_batches, loss_fn, num_still=mini_batch.plan.num_still, replay=replay,
                rate_scale=before_the_step if looks else by_ess,
            )  # fmt: skip
        self._num_steps += 1
        if measures_mismatch and not looks:
            self._update_mismatch(sums)
        return step

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
        plan, rows = mini_batch.plan, packed.sequence_indices
        chosen = torch.tensor(rows)
        packed, teacher_T = self._teacher.credited(packed, chosen)
        several = self._episodes.have_several

        def uploaded(values_M: Tensor) -> Tensor:
            return values_M[chosen].to(packed.mask_T.device, non_blocking=True)

        lag_S = sequence_lag(
            self._batch.policy_version, packed.versions_T, packed.mask_T, packed.sequence_ids_T, packed.num_sequences
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
            num_sequences=plan.num_episodes,
            episode_ids_S=uploaded(self._episodes.ids) if several else None,
            tokens_per_sequence_S=uploaded(self._episodes.num_tokens) if several else None,
            num_tokens=plan.num_action_tokens if self._objective.aggregation == "token" else None,
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
        auxiliary = result.balance_loss * (packed.num_tokens / plan.num_tokens)
        self._auxiliary.append(auxiliary.detach().double())
        return output.loss + auxiliary

    def auxiliary_metrics(self) -> dict[str, float]:
        """Return the mean over steps of the load-balancing loss; empty without one. Collective where there is one."""
        if not self._engine.balances_load:
            return {}
        own = torch.stack(self._auxiliary).sum() if self._auxiliary else torch.zeros((), dtype=torch.float64)
        return {"load_balancing_loss": float(sum_over_sequences(self._engine, own)) / self._num_steps}

    def rate_metrics(self) -> dict[str, float]:
        """The mean factor of the learning rate by effective sample size; empty without one."""
        if not self._rate_scales:
            return {}
        return {"learning_rate_scale": sum(self._rate_scales) / len(self._rate_scales)}

    def _mismatch_sums(self, packed: PackedBatch, logprobs_T: Tensor) -> Tensor:
        version = self._batch.policy_version
        with trusted_values():
            sums = mismatch_sums(logprobs_T.detach(), packed.behaviour_T, packed.mask_T, packed.versions_T, version)
        return sums if self._first_look is None else torch.cat([sums, self._first_look.sums(packed, logprobs_T, version)])

    def _update_mismatch(self, sums: Sequence[Tensor]) -> None:
        size = 3 if self._first_look is None else 6
        own = torch.stack(list(sums)).sum(dim=0) if sums else torch.zeros(size, dtype=torch.float64)
        summed = sum_over_sequences(self._engine, own)
        moments = MismatchMoments.from_tensor(summed[:3])
        if not math.isfinite(moments.total_of_squares):
            raise NonFiniteLossError("some log-probs of the batch's start are not finite; no step was made")
        if self._first_look is not None:
            self._first_look.require(summed[3:])
        self._mismatch.update(moments)


@dataclass(frozen=True)
class _Episodes:
    """For each sequence of the batch, [M]: its episode, and n_i, the action tokens of all sequences of that episode."""

    ids: Tensor
    num_tokens: Tensor
    have_several: bool
    """Some episode has several sequences; otherwise the loss counts by itself."""

    @classmethod
    def of(cls, batch: PlannedBatch) -> _Episodes:
        rows = batch.rows
        per_episode = np.bincount(rows.episode_ids, weights=rows.num_action_tokens)
        of_rows = torch.from_numpy(per_episode[rows.episode_ids].astype(np.float32))
        return cls(torch.from_numpy(rows.episode_ids), of_rows, have_several=len(per_episode) < len(rows.sequences))

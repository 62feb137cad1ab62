"""Turn one batch into optimizer steps, with the library's advantages, packing, log-probs, clip range and loss.

Each mini-batch is two micro-batches of equal size, so that the agreement of their gradients costs nothing to measure.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.study.clip_forms import study_clip_range, study_terms, study_weights, tokens_of
from benchmarks.study.config import RunConfig
from benchmarks.study.measures import GradientNoise, flat_gradient, lag_record, loss_record, ratio_record
from benchmarks.study.tasks.credit import NumberGrades, answer_advantages, number_advantages
from gspo.adaptive import AdaptiveClip
from gspo.calibration import LagCalibration, measured_sequences
from gspo.diagnostics import SequenceStats
from gspo.inputs.units import segment_mean
from gspo.loss import gspo_loss
from gspo.mismatch import MismatchMoments, MismatchTracker, mismatch_moments, sequence_mismatch
from gspo.model.logprobs import TokenLogProbs
from gspo.model.packing import PackedBatch, TrainSequence, pack
from gspo.model.policy import prepare_policy
from gspo.moe.experts import ExpertPicks, ExpertRecorder, changed_share, find_routers
from gspo.moe.routing_replay import RoutingReplay
from gspo.settings import Objective
from gspo.staleness import sequence_lag
from gspo_services.learner.plan import deal_in_turn

HALVES = 2
LOGPROB_CHUNK_TOKENS = 4_096
MAX_GRAD_NORM = 1.0
ADAM_BETAS = (0.9, 0.99)
KERNEL_CLAMP, USUAL_CLAMP = Objective.vespo().log_ratio_clamp, Objective().log_ratio_clamp
ROUTER_PULL = 0.1
"""The part of the way back to its start that each update pulls a router of the deep model."""


class DivergedError(ArithmeticError):
    """Raised for a gradient that is not finite, which ends the run."""


@dataclass
class MicroBatch:
    """Half a mini-batch, and its measurements under the weights of the batch's start."""

    packed: PackedBatch
    lag_S: Tensor
    start_logprobs_T: Tensor | None = None
    start_picks: ExpertPicks | None = None


class Learner:
    """A model with its optimizer, and the running state of the clip range."""

    def __init__(self, model: Any, config: RunConfig) -> None:
        """Take a Hugging Face mixture of experts, which from now on returns log-probs of packed sequences."""
        prepare_policy(model, logprob_chunk_tokens=LOGPROB_CHUNK_TOKENS)
        self._model = model
        self._config = config
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=config.learning_rate, betas=ADAM_BETAS, weight_decay=0.0, foreach=True
        )
        routers = find_routers(model).values() if config.model == "deep" else ()
        self._routers = [(router.weight, router.weight.detach().clone()) for router in routers]
        """The weights of those that stay undecided, and what they were."""
        self._recorder = ExpertRecorder(model)
        self._replay = RoutingReplay(model)
        self._mismatch = MismatchTracker()
        self._adaptive = AdaptiveClip(target=config.clip_target)
        self._calibration = LagCalibration()
        self._dealer = torch.Generator().manual_seed(config.seed)

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of the weights."""
        return {name: tensor.detach().clone() for name, tensor in self._model.state_dict().items()}

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Take these weights; the optimizer keeps its state."""
        self._model.load_state_dict(weights)

    def state(self) -> dict[str, Any]:
        """Return a copy of weights and optimizer."""
        return copy.deepcopy({"weights": self._model.state_dict(), "optimizer": self._optimizer.state_dict()})

    def load_state(self, state: dict[str, Any]) -> None:
        """Go back to a state, but keep this learner's own learning rate."""
        self._model.load_state_dict(state["weights"])
        self._optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.learning_rate

    def train(
        self,
        sequences: Sequence[TrainSequence],
        rewards: Sequence[float],
        *,
        version: int,
        diagnose: bool,
        grades: Sequence[NumberGrades] | None = None,
    ) -> dict[str, float]:
        """Make the optimizer steps of one batch; return the values to record, with CPU seconds by phase.

        Args:
            sequences: whole groups, one after the other.
            version: of the weights before the batch.
            diagnose: run the reference pass even where the objective does not need it, to see which experts change.
            grades: of each sequence's numbers; None: every token has its sequence's advantage.

        Raises: DivergedError for a gradient that is not finite.
        """
        places = self._order(sequences, version)
        sequences, rewards = [sequences[place] for place in places], [rewards[place] for place in places]
        grades = None if grades is None else [grades[place] for place in places]
        mini_batches = self._mini_batches(sequences, rewards, version, grades)
        record: dict[str, float] = {}
        began = time.process_time()
        replays_own = self._config.routing_replay and self._config.replay_from == "learner"
        needs_start = self._config.anchor == "proximal" or replays_own
        if needs_start or diagnose:
            self._measure_start(mini_batches, version)
        measured = time.process_time()
        record["cpu_reference_s" if needs_start else "cpu_diagnosis_s"] = measured - began
        noise, stats, deltas, norms = GradientNoise(), list[SequenceStats](), list[Tensor](), list[float]()
        for index, mini_batch in enumerate(mini_batches):
            halves = []
            before: Tensor | None = None
            self._optimizer.zero_grad(set_to_none=True)
            for micro in mini_batch:
                part, delta_T, changed = self._step_half(micro, version, index)
                stats.append(part)
                deltas.append(delta_T)
                if changed is not None:
                    record[f"changed_{index}"] = record.get(f"changed_{index}", 0.0) + changed / len(mini_batch)
                after = flat_gradient(self._parameters)
                halves.append(after if before is None else after - before)
                before = after
            half_size = mini_batch[0].packed.num_sequences
            # Each half was divided by the size of the whole.
            noise.add(HALVES * halves[0], HALVES * halves[1], num_sequences=half_size)
            norms.append(float(torch.nn.utils.clip_grad_norm_(self._parameters, MAX_GRAD_NORM)))
            if not math.isfinite(norms[-1]):
                raise DivergedError(f"gradient norm is {norms[-1]} in batch {version}, mini-batch {index}")
            self._optimizer.step()
            self._pull_routers()
            if index == 0 and self._config.anchor == "behaviour":
                self._update_mismatch(mini_batch, deltas, version)
        trained = time.process_time()
        record["cpu_train_s"] = trained - measured
        if diagnose:
            record |= self._changed_after(mini_batches[0])
            record["cpu_diagnosis_s"] = record.get("cpu_diagnosis_s", 0.0) + time.process_time() - trained
        record |= noise.record() | self._judge(SequenceStats.merge(stats), deltas)
        record["grad_norm"] = sum(norms) / len(norms)
        record["grad_norm_max"] = max(norms)
        return record

    def logprobs(self, packed: PackedBatch, picks: ExpertPicks | None = None) -> TokenLogProbs:
        """Return log-probs with entropy and the chosen experts; ``picks``, if given, are replayed."""
        partial = self._config.replay_from == "engine"
        replay = nullcontext() if picks is None else self._replay.replaying(picks, partial=partial)
        with replay, self._recorder.recording():
            result: TokenLogProbs = self._model(
                input_ids=packed.input_ids,
                position_ids=packed.position_ids,
                cu_seqlens=packed.cu_seqlens,
                targets_T=packed.targets_T,
                temperatures_T=packed.temperatures_T,
                with_entropy=True,
            )
        return result._replace(experts=self._recorder.take())

    def _picks_of_engine(self, packed: PackedBatch) -> ExpertPicks | None:
        """Return the experts that the sampler reported, if this run replays them."""
        if self._config.replay_from != "engine":
            return None
        assert packed.experts_TLK is not None, "a sampler reports the experts of every token"
        return ExpertPicks(packed.experts_TLK.transpose(0, 1), self._model.config.num_experts)

    def _order(self, sequences: Sequence[TrainSequence], version: int) -> list[int]:
        """Return the places of the sequences in the order in which they are trained: mini-batches are consecutive."""
        size, num_groups = self._config.group_size, self._config.num_groups
        oldest = [int(sequences[group * size].versions.max()) for group in range(num_groups)]
        groups = list(range(num_groups))
        if self._config.order == "oldest_first":
            groups.sort(key=lambda group: oldest[group])
        elif self._config.order == "dealt":
            dealt = deal_in_turn(oldest, list(map(str, groups)), self._config.num_mini_batches, seed=version)
            groups = [group for chosen in dealt for group in chosen]
        return [group * size + member for group in groups for member in range(size)]

    def _mini_batches(
        self,
        sequences: Sequence[TrainSequence],
        rewards: Sequence[float],
        version: int,
        grades: Sequence[NumberGrades] | None,
    ) -> list[list[MicroBatch]]:
        config = self._config
        group_ids = np.repeat(np.arange(config.num_groups), config.group_size)
        if grades is None:
            advantages = answer_advantages(sequences, rewards, group_ids)
        else:
            advantages = number_advantages(sequences, grades, group_ids)
        size = config.num_sequences // config.num_mini_batches
        mini_batches = []
        for start in range(0, config.num_sequences, size):
            members = sequences[start : start + size]
            values = advantages[start : start + size]
            if config.aggregation == "length":
                weights = length_weights([sequence.num_action_tokens for sequence in members])
                values = [value_L * weight for value_L, weight in zip(values, weights, strict=True)]
            trained = [sequence.with_advantages(value_L) for sequence, value_L in zip(members, values, strict=True)]
            half = size // HALVES
            packs = [pack(part, policy_version=version) for part in (trained[:half], trained[half:])]
            mini_batches.append([MicroBatch(packed, _lag(packed, version)) for packed in packs])
        return mini_batches

    @torch.no_grad()
    def _measure_start(self, mini_batches: Sequence[Sequence[MicroBatch]], version: int) -> None:
        moments = MismatchMoments(0.0, 0.0, 0.0)
        for micro in (micro for mini_batch in mini_batches for micro in mini_batch):
            result = self.logprobs(micro.packed, self._picks_of_engine(micro.packed))
            micro.start_logprobs_T = result.logprobs_T
            micro.start_picks = result.experts
            packed = micro.packed
            moments += mismatch_moments(result.logprobs_T, packed.behaviour_T, packed.mask_T, packed.versions_T, version)
        if self._config.anchor == "proximal":
            self._mismatch.update(moments)

    def _step_half(self, micro: MicroBatch, version: int, index: int) -> tuple[SequenceStats, Tensor, float | None]:
        """Add one half's gradient; return its statistics, log-ratios at action tokens, and share of changed experts."""
        config, packed = self._config, micro.packed
        picks = self._picks_of_engine(packed)
        result = self.logprobs(packed, micro.start_picks if config.routing_replay and picks is None else picks)
        anchor_T, weights = packed.behaviour_T, None
        if config.anchor == "proximal":
            assert micro.start_logprobs_T is not None
            anchor_T = micro.start_logprobs_T
            weights = study_weights(config, packed, anchor_T, self._calibration.current, micro.lag_S)
        output = gspo_loss(
            result.logprobs_T,
            anchor_T,
            packed.advantages_T,
            packed.mask_T,
            packed.sequence_ids_T,
            num_sequences=HALVES * packed.num_sequences,
            clip_range=study_clip_range(
                config,
                micro.lag_S,
                tokens_of(packed),
                sigma=self._mismatch.sigma,
                scale=self._adaptive.scale,
                calibration=self._calibration.current,
                generator=self._dealer,
            ),
            ratio_unit=config.ratio_unit,
            mismatch_weights_S=None if weights is None else weights.weights_S,
            mismatch_weights_T=None if weights is None else weights.weights_T,
            surrogate=study_terms(config, micro.lag_S, tokens_of(packed), self._calibration.current),
            log_ratio_clamp=KERNEL_CLAMP if config.surrogate in ("vespo", "tempered") else USUAL_CLAMP,
        )
        output.loss.backward()  # type: ignore[no-untyped-call]
        logprobs_T = result.logprobs_T.detach()
        assert result.entropies_T is not None
        pair = (packed.behaviour_T, packed.mask_T, packed.sequence_ids_T, packed.num_sequences)
        now = sequence_mismatch(logprobs_T, *pair)
        seen = now if micro.start_logprobs_T is None else sequence_mismatch(micro.start_logprobs_T, *pair)
        stats = replace(
            output.stats,
            entropy_S=segment_mean(result.entropies_T, packed.mask_T, packed.sequence_ids_T, packed.num_sequences),
            mismatch_kl_S=now.kl_S,
            mismatch_S=seen.mean_S,
            mismatch_variance_S=seen.token_variance_S,
        )
        changed = None
        if index > 0 and micro.start_picks is not None and result.experts is not None and not config.routing_replay:
            changed = changed_share(result.experts, micro.start_picks, packed.mask_T)
        return stats, (logprobs_T - anchor_T)[packed.mask_T], changed

    def _judge(self, merged: SequenceStats, deltas: Sequence[Tensor]) -> dict[str, float]:
        """Return what the sequences of a batch show, and let the calibration and the adaptive clip range learn from it."""
        config = self._config
        # With a pass at the start every sequence was seen under the starting weights, else those of the first mini-batch.
        num_seen = config.num_sequences // (1 if config.anchor == "proximal" else config.num_mini_batches)
        self._calibration.update(measured_sequences(merged, range(num_seen)))
        record = loss_record(merged) | lag_record(merged)
        record |= ratio_record(merged.log_ratio_S, "sequence_ratio") | ratio_record(torch.cat(list(deltas)), "token_ratio")
        record["mismatch_sigma"] = self._mismatch.sigma
        record["clip_scale"] = self._adaptive.scale
        record["mismatch_kl"] = float(merged.mismatch_kl_S.mean())
        if config.clip == "adaptive":
            self._adaptive.update(min(1.0, record["clip"]))
        return record

    @torch.no_grad()
    def _pull_routers(self) -> None:
        """Pull the deep model's routers back a little: as they learn, updates change fewer of their choices.

        In large models the losses that balance the experts' load keep routers undecided.
        """
        for weight, first in self._routers:
            weight.lerp_(first, ROUTER_PULL)

    @torch.no_grad()
    def _changed_after(self, mini_batch: Sequence[MicroBatch]) -> dict[str, float]:
        """Return the share of experts that the whole batch's updates changed, on one mini-batch; replay is left out."""
        shares = []
        for micro in mini_batch:
            experts = self.logprobs(micro.packed).experts
            if experts is not None and micro.start_picks is not None:
                shares.append(changed_share(experts, micro.start_picks, micro.packed.mask_T))
        return {"changed_after": sum(shares) / len(shares)} if shares else {}

    def _update_mismatch(self, mini_batch: Sequence[MicroBatch], deltas: Sequence[Tensor], version: int) -> None:
        """Update sigma from the first mini-batch, which has the log-probs of the batch's start."""
        moments = MismatchMoments(0.0, 0.0, 0.0)
        for micro, delta_T in zip(mini_batch, deltas, strict=True):
            fresh_T = delta_T[micro.packed.versions_T[micro.packed.mask_T] == version].double()
            moments += MismatchMoments(float(fresh_T.numel()), float(fresh_T.sum()), float(fresh_T.square().sum()))
        self._mismatch.update(moments)


def length_weights(lengths: Sequence[int]) -> NDArray[np.float32]:
    """Return n_i / mean n, which turns a mean of sequences, each a mean over n_i tokens, into a mean over all tokens."""
    mean = sum(lengths) / len(lengths)
    return np.array([length / mean for length in lengths], dtype=np.float32)


def _lag(packed: PackedBatch, version: int) -> Tensor:
    return sequence_lag(version, packed.versions_T, packed.mask_T, packed.sequence_ids_T, packed.num_sequences)

"""A learner engine of one process with a tiny mixture of experts and plain gradient descent. No DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from gspo.model.logprobs import TokenLogProbs
from gspo.model.packing import PackedBatch
from gspo.model.policy import prepare_policy
from gspo.moe.experts import ExpertPicks, ExpertRecorder, ExpertShape
from gspo.moe.load_balance import RouterLogits, load_balancing_loss
from gspo.moe.routing_replay import RoutingReplay
from gspo_services.learner.engine.step import LossFn, ReplayFn, StepResult
from gspo_services.learner.profiling import NO_PROFILE, Phases


class MoeEngine:
    """Each mini-batch ends with ``update(model)`` instead of an optimizer."""

    rank = 0
    world_size = 1
    max_sequence_tokens: int | None = None

    def __init__(
        self,
        model: Any,
        *,
        max_tokens_per_micro_batch: int = 200,
        update: Callable[[Any], None],
        replays_routing: bool = False,
        engine_experts: ExpertShape | None = None,
        load_balance_coefficient: float = 0.0,
    ) -> None:
        prepare_policy(model, logprob_chunk_tokens=64, activation_checkpointing=True)
        self.model = model
        self.max_tokens_per_micro_batch = max_tokens_per_micro_batch
        self.sequence_parallel = 1
        self.shares_beginnings = False
        self.profile: Phases = NO_PROFILE
        self._update = update
        self._experts = ExpertRecorder(model)
        self.replays_routing = replays_routing
        self.engine_experts = engine_experts
        self._replay: RoutingReplay | None = None
        self._coefficient = load_balance_coefficient
        self._balance = RouterLogits(model) if load_balance_coefficient > 0 else None
        self.balances_load = load_balance_coefficient > 0

    def logprobs(self, packed: PackedBatch, *, with_entropy: bool = False) -> TokenLogProbs:
        with torch.no_grad(), self._replaying(packed, None):
            return self._forward(packed, with_entropy)

    def train_mini_batch(
        self,
        micro_batches: Sequence[PackedBatch],
        loss_fn: LossFn,
        *,
        num_still: int = 0,
        replay: ReplayFn | None = None,
        rate_scale: Callable[[], float] | None = None,
    ) -> StepResult:
        assert rate_scale is None
        total = 0.0
        for index, packed in enumerate(micro_batches):
            picks = None if replay is None else replay(packed)
            if not packed.is_empty:
                with self._replaying(packed, picks), torch.set_grad_enabled(index >= num_still):
                    loss = loss_fn(packed, self._forward(packed, True))
                    if index >= num_still:
                        loss.backward()  # type: ignore[no-untyped-call]
                total += float(loss.detach())
        with torch.no_grad():
            self._update(self.model)
        return StepResult(loss=total, grad_norm=0.0, learning_rate=0.0, num_tokens=0, num_computed_tokens=0)

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def _replaying(self, packed: PackedBatch, picks: ExpertPicks | None) -> AbstractContextManager[None]:
        if self.engine_experts is not None and packed.experts_TLK is not None:
            picks = ExpertPicks(packed.experts_TLK.transpose(0, 1), self.engine_experts.num_experts)
        if picks is None:
            return nullcontext()
        self._replay = self._replay or RoutingReplay(self.model)
        return self._replay.replaying(picks, partial=self.engine_experts is not None)

    def _forward(self, packed: PackedBatch, with_entropy: bool) -> TokenLogProbs:
        with self._experts.recording(), nullcontext() if self._balance is None else self._balance.recording():
            result: TokenLogProbs = self.model(
                input_ids=packed.input_ids,
                position_ids=packed.position_ids,
                cu_seqlens=packed.cu_seqlens,
                targets_T=packed.targets_T,
                temperatures_T=packed.temperatures_T,
                with_entropy=with_entropy,
            )
        if self._balance is not None and with_entropy:
            auxiliary = load_balancing_loss(self._balance.take(), self._balance.top_k)
            result = result._replace(balance_loss=self._coefficient * auxiliary)
        own = None if self._replay is None else self._replay.take_own()
        return result._replace(experts=self._experts.take(), own_experts=own)

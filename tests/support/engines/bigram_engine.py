"""A learner engine of one process whose model is a table: log p(next | token). Milliseconds instead of DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gspo.model.logprobs import TokenLogProbs, chunked_logprobs
from gspo.model.packing import PackedBatch
from gspo_services.learner.engine.gradients import NonFiniteLossError
from gspo_services.learner.engine.step import LossFn, ReplayFn, StepResult, micro_batch_loss
from gspo_services.learner.profiling import NO_PROFILE, Phases


class BigramEngine:
    """Plain gradient descent on logits[token, next]; records what it was asked to do."""

    rank = 0
    world_size = 1
    replays_routing = False
    engine_experts = None
    balances_load = False

    def __init__(
        self,
        vocab_size: int = 16,
        *,
        max_tokens_per_micro_batch: int = 64,
        learning_rate: float = 0.1,
        seed: int = 0,
        entropy_gradient: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(vocab_size, vocab_size, generator=generator).requires_grad_()
        self._entropy_gradient = entropy_gradient
        self._start_table = self.table.detach().clone()
        self.teacher_table = torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(seed + 100))
        self.max_tokens_per_micro_batch = max_tokens_per_micro_batch
        self.sequence_parallel = 1
        self.shares_beginnings = False
        self.max_sequence_tokens: int | None = None
        self._learning_rate = learning_rate
        self.profile: Phases = NO_PROFILE
        self.num_forward_passes = 0
        self.gradients: list[Tensor] = []

    def logprobs(self, packed: PackedBatch, *, with_entropy: bool = False) -> TokenLogProbs:
        self.num_forward_passes += 1
        with torch.no_grad():
            return self._forward(packed, with_entropy)

    def reference_logprobs(self, packed: PackedBatch) -> Tensor:
        return _of_table(self._start_table, packed)

    def prepare_teacher(self, micro_batches: Iterable[PackedBatch]) -> None:
        """Its teacher is never asked ahead."""

    def teacher_logprobs(self, packed: PackedBatch) -> Tensor:
        return _of_table(self.teacher_table, packed)

    def train_mini_batch(
        self,
        micro_batches: Sequence[PackedBatch],
        loss_fn: LossFn,
        *,
        num_still: int = 0,
        replay: ReplayFn | None = None,
        rate_scale: Callable[[], float] | None = None,
    ) -> StepResult:
        assert replay is None
        total = torch.zeros(())
        for index, packed in enumerate(micro_batches):
            if not packed.is_empty:
                with torch.set_grad_enabled(index >= num_still):
                    total = total + micro_batch_loss(packed, self._forward(packed, True), loss_fn)
        if not total.isfinite():
            raise NonFiniteLossError(f"the loss over all ranks is {float(total.detach())}; no step was made")
        (gradient,) = torch.autograd.grad(total, self.table)
        self.gradients.append(gradient)
        learning_rate = self._learning_rate * (1.0 if rate_scale is None else rate_scale())
        with torch.no_grad():
            self.table -= learning_rate * gradient
        return StepResult(
            loss=float(total.detach()),
            grad_norm=float(gradient.norm()),
            learning_rate=learning_rate,
            num_tokens=sum(packed.num_tokens for packed in micro_batches),
            num_computed_tokens=sum(packed.num_computed_tokens for packed in micro_batches),
        )

    def _forward(self, packed: PackedBatch, with_entropy: bool) -> TokenLogProbs:
        one_hot = torch.nn.functional.one_hot(packed.input_ids[0], self.table.shape[0]).float()
        return chunked_logprobs(
            one_hot,
            self.table.t(),
            packed.targets_T,
            packed.temperatures_T,
            chunk_tokens=32,
            with_entropy=with_entropy,
            entropy_gradient=self._entropy_gradient,
        )

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def broadcast(self, tensor: Tensor, *, source: int = 0) -> Tensor:
        return tensor.clone()

    def barrier(self) -> None:
        return

    def layout(self) -> dict[str, Any]:
        return {"model": "bigram", "vocabulary": self.table.shape[0], "num_ranks": 1}

    def weights_digest(self) -> str:
        return self.table.detach().numpy().tobytes().hex()[:64]

    def save_state(self, directory: Path) -> list[Path]:
        directory.mkdir()
        save_file({"table": self.table.detach()}, directory / "table.safetensors")
        return [directory / "table.safetensors"]

    def copy_state(self, directory: Path) -> BigramCopy:
        return BigramCopy(self)

    def load_state(self, directory: Path) -> None:
        self.table = load_file(directory / "table.safetensors")["table"].requires_grad_()


def _of_table(table: Tensor, packed: PackedBatch) -> Tensor:
    one_hot = torch.nn.functional.one_hot(packed.input_ids[0], table.shape[0]).float()
    return chunked_logprobs(one_hot, table.t(), packed.targets_T, packed.temperatures_T, chunk_tokens=32).logprobs_T


class BigramCopy:
    """The state that the engine's ``save_state`` would have written when this was made."""

    def __init__(self, engine: BigramEngine) -> None:
        self._table = engine.table.detach().clone()
        self._digest = engine.weights_digest()

    def write(self, directory: Path) -> list[Path]:
        directory.mkdir()
        save_file({"table": self._table}, directory / "table.safetensors")
        return [directory / "table.safetensors"]

    def weights_digest(self) -> str:
        return self._digest

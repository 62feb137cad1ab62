"""A learner engine of one process whose model is a table: log p(next | token). Milliseconds instead of DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo.model.logprobs import TokenLogProbs, chunked_logprobs
from gspo.model.packing import PackedBatch
from gspo_services.learner.checkpoints.digest_stream import streamed_digest
from gspo_services.learner.checkpoints.state_copy import EngineCopy
from gspo_services.learner.checkpoints.state_files import TensorDirectory, TensorFile
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
        num_files: int = 1,
    ) -> None:
        """``num_files``: of its state, which the real copy of a state writes."""
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
        self._num_files = num_files
        self.copied: Callable[[list[TensorFile]], Sequence[TensorFile]] = list
        """What becomes of the files of a copy that is written beside training."""

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
        return _digest_of(self.table)

    def save_state(self, directory: Path) -> list[Path]:
        return list(self._copy(self._files()).write(directory))

    def copy_state(self, directory: Path) -> EngineCopy:
        return self._copy(self.copied(self._files()))

    def load_state(self, directory: Path) -> None:
        shape = (len(self.table), len(self.table))
        self.table = TensorDirectory(directory).read("table", 0, len(self.table), shape).requires_grad_()

    def _files(self) -> list[TensorFile]:
        rows = self.table.detach().clone().chunk(self._num_files)
        stems = ["table"] if len(rows) == 1 else [f"rows-{at}" for at in range(len(rows))]
        return [
            TensorFile(stem=stem, tensors={"table": part}, first_row=at * len(part))
            for at, (stem, part) in enumerate(zip(stems, rows, strict=True))
        ]

    def _copy(self, files: Sequence[TensorFile]) -> EngineCopy:
        return EngineCopy(rank=self.rank, files=files, num_steps=1, canary=[0.0], digest=_digest_of(self.table))


def _digest_of(table: Tensor) -> str:
    return streamed_digest([("table", table)]).hex()


def _of_table(table: Tensor, packed: PackedBatch) -> Tensor:
    one_hot = torch.nn.functional.one_hot(packed.input_ids[0], table.shape[0]).float()
    return chunked_logprobs(one_hot, table.t(), packed.targets_T, packed.temperatures_T, chunk_tokens=32).logprobs_T

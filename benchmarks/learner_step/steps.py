"""The compared steps; each is a callable that makes one whole optimizer step on the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.learner_step.models import Shape, build
from gspo.model.attention import register_segment_attention
from gspo.model.micro_batches import plan_micro_batches
from gspo.model.packing import PackedBatch, TrainGroup, pack
from gspo.settings import Objective
from gspo_services.learner.advantages import AdvantageSettings, sequences_with_advantages
from gspo_services.learner.batch_run import Trackers
from gspo_services.learner.engine import LearnerEngine
from gspo_services.learner.planned_batch import BatchSettings, plan_batch
from gspo_services.learner.start import EngineSettings
from gspo_services.learner.trainer import train_batch
from gspo_services.shared.settings import Learner as LearnerSettings

LEARNING_RATE = 1e-6
BETAS = (0.9, 0.999)
CHUNK_TOKENS = 512
Step = Callable[[], None]


class Learner:
    """The learner's own step: advantages, packing, loss, diagnostics, DeepSpeed's backward and AdamW (ZeRO 1, one rank)."""

    def __init__(self, shape: Shape, dtype: str, max_tokens_per_micro_batch: int) -> None:
        learner = LearnerSettings(
            dtype=dtype,  # type: ignore[arg-type]
            learning_rate=LEARNING_RATE,
            betas=BETAS,
            max_tokens_per_micro_batch=max_tokens_per_micro_batch,
            logprob_chunk_tokens=CHUNK_TOKENS,
        )
        settings = EngineSettings(learner=learner, device="cpu", max_sequence_tokens=None, routing_replay=False, seed=0)
        self.engine = LearnerEngine.from_model(build(shape, dtype), settings)

    def step(self, groups: Sequence[TrainGroup], *, anchor: str = "behaviour") -> Step:
        """Make one optimizer step on ``groups``; with anchor "proximal" after a forward pass for the batch's start."""
        objective = Objective(anchor=anchor, tis_mode="off")  # type: ignore[arg-type]

        def make() -> None:
            train_batch(self.engine, plan_batch(self.engine, groups, 0, objective, BatchSettings()), Trackers())

        return make


class Bare:
    """The same model and segment attention on the same packed micro-batches, and nothing else.

    It takes log_softmax and gather of the whole logits, their mean, and backward. ``with_adam`` adds PyTorch's plain AdamW.
    """

    def __init__(self, shape: Shape, dtype: str, max_tokens_per_micro_batch: int) -> None:
        self.model: Any = build(shape, dtype, attention=register_segment_attention())
        self._max_tokens_per_micro_batch = max_tokens_per_micro_batch
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0)

    def step(self, groups: Sequence[TrainGroup], *, with_adam: bool, first_pass: bool = False) -> Step:
        packed = packed_micro_batches(groups, self._max_tokens_per_micro_batch)
        num_tokens = sum(part.num_tokens for part in packed)

        def make() -> None:
            if first_pass:
                with torch.no_grad():
                    for part in packed:
                        self._sum_of_logprobs(part)
            for part in packed:
                (self._sum_of_logprobs(part) / num_tokens).backward()
            if with_adam:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self._optimizer.step()
            self._optimizer.zero_grad()

        return make

    def _sum_of_logprobs(self, packed: PackedBatch) -> Tensor:
        output = self.model(
            input_ids=packed.input_ids, position_ids=packed.position_ids, cu_seqlens=packed.cu_seqlens, use_cache=False
        )
        log_softmax = torch.log_softmax(output.logits[0].float(), dim=-1)
        return log_softmax.gather(-1, packed.targets_T[:, None]).sum()


def packed_micro_batches(groups: Sequence[TrainGroup], max_tokens_per_micro_batch: int) -> list[PackedBatch]:
    """Return the learner's own micro-batches of one rank."""
    sequences, _ = sequences_with_advantages(groups, AdvantageSettings())
    (plan,) = plan_micro_batches([sequence.num_tokens for sequence in sequences], max_tokens_per_micro_batch, 1)
    return [pack([sequences[index] for index in indices], policy_version=0, sequence_indices=indices) for indices in plan]

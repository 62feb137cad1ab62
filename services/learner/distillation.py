"""Mixes what a frozen teacher says of each token into the advantages of a micro-batch: ``gspo.options.distillation``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gspo.advantages import sequence_values_to_tokens
from gspo.diagnostics import SequenceStats
from gspo.inputs.validation import trusted_values
from gspo.model.packing import PackedBatch
from gspo.options.distillation import teacher_advantages, teacher_kl
from gspo_services.learner.advantages import AdvantageSettings
from gspo_services.learner.engine import NonFiniteLossError
from gspo_services.learner.sums import SummingRank, sum_over_sequences


class TeacherEngine(SummingRank, Protocol):
    """The methods of an engine that a teacher needs."""

    def teacher_logprobs(self, packed: PackedBatch) -> Tensor: ...
    def prepare_teacher(self, micro_batches: Iterable[PackedBatch]) -> None: ...


class Distillation:
    """The teacher's part in the loss of one batch on one rank."""

    def __init__(
        self, engine: TeacherEngine, settings: AdvantageSettings, *, clamp: float, filtered_M: NDArray[np.bool_]
    ) -> None:
        """``filtered_M``: the batch's sequences whose tokens get no advantage."""
        self._engine = engine
        self._settings = settings
        self._clamp = clamp
        self._counts_M = None if not filtered_M.any() else torch.from_numpy(~filtered_M).float()
        self._num_unsound: Tensor | None = None
        """Of the teacher's log-probs, on the engine's device: to read it, the host would wait."""

    def begin(self, micro_batches: Iterable[PackedBatch]) -> None:
        """Let a teacher that is asked ahead score this rank's share of the batch. Collective. Raises: TeacherError."""
        if self._settings.teacher_coefficient:
            self._engine.prepare_teacher(micro_batches)

    def credited(self, packed: PackedBatch, rows_S: Tensor) -> tuple[PackedBatch, Tensor | None]:
        """Return the micro-batch with the advantages to train it with, and the teacher's log-probs, [T]; without a teacher
        the same batch, and None. rows_S: int64; the places of its sequences in the batch."""
        coefficient = self._settings.teacher_coefficient
        if coefficient == 0:
            return packed, None
        teacher_T = self._engine.teacher_logprobs(packed)
        with trusted_values():
            d_T = teacher_advantages(teacher_T, packed.behaviour_T, packed.mask_T, clamp=self._clamp)
        unsound = d_T.isnan().sum().double()
        self._num_unsound = unsound if self._num_unsound is None else self._num_unsound + unsound
        if self._counts_M is not None:
            counts_S = self._counts_M[rows_S].to(d_T.device, non_blocking=True)
            with trusted_values():
                counts_T = sequence_values_to_tokens(counts_S, packed.sequence_ids_T, packed.mask_T)
            d_T = torch.where(counts_T > 0, d_T, 0.0)
        of_rewards_T = torch.zeros_like(d_T) if self._settings.teacher_only else packed.advantages_T
        return replace(packed, advantages_T=of_rewards_T + coefficient * d_T), teacher_T

    @contextmanager
    def named(self) -> Iterator[None]:
        """Make a step inside. Where its loss is not finite for the teacher's sake, the error says so, on all ranks.

        Collective after such an error. Raises: NonFiniteLossError.
        """
        try:
            yield
        except NonFiniteLossError as error:
            own = torch.zeros((), dtype=torch.float64) if self._num_unsound is None else self._num_unsound
            number = int(sum_over_sequences(self._engine, own))
            if not number:
                raise
            raise NonFiniteLossError(
                f"the teacher's log-probs of {number} action tokens are not finite (distillation.teacher); no step was "
                "made. Look at its weights, or let it compute in float32 (learner.dtype)"
            ) from error


def with_teacher_kl(stats: SequenceStats, packed: PackedBatch, teacher_T: Tensor | None) -> SequenceStats:
    """Add the distance from the teacher to a micro-batch's statistics."""
    if teacher_T is None:
        return stats
    kl_S = teacher_kl(teacher_T, packed.behaviour_T, packed.mask_T, packed.sequence_ids_T, packed.num_sequences)
    return replace(stats, teacher_kl_S=kl_S)

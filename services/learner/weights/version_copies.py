"""Copies what becomes the next policy version: all weights with adapters merged into them, or the adapters alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import structlog
import torch

from gspo.model.serving_layout import ServedParameter
from gspo_services.learner.weights.adapter_copy import PublishedBase, copy_adapter
from gspo_services.learner.weights.copy_memory import CopyMemory
from gspo_services.learner.weights.weight_copy import DTYPES, WeightCopy, copy_parameters
from gspo_services.shared.settings import Settings

log = structlog.get_logger()


class Serving(Protocol):
    """The part of ``LearnerEngine`` that versions are copied from. All of it is collective."""

    def served_parameters(self, dtype: torch.dtype | None = None) -> Iterator[ServedParameter]: ...


class VersionCopies:
    """Copies the weights of one rank's engine. Rank 0 gets the copies; the other ranks take part."""

    def __init__(self, engine: Serving, settings: Settings, *, has_copies: bool) -> None:
        """``has_copies``: whether this is rank 0."""
        self._engine: Any = engine
        self._lora = settings.lora
        self._dtype = DTYPES[settings.model.dtype]
        self._has_copies = has_copies
        self._base: PublishedBase | None = None
        self._knows_base = False
        self._memory = CopyMemory()

    def copy(self) -> WeightCopy | None:
        """Copy the weights as they are served now; None on ranks without copies. Collective."""
        if self._lora.publish == "merged":
            return self._taken(self._engine.served_parameters(self._dtype))
        if not self._knows_base:
            base = self._taken(self._engine.base_parameters(self._dtype))
            self._base = None if base is None else PublishedBase(base)
            self._knows_base = True
        probe = self._engine.probe()
        matrices = self._engine.adapter_parameters(self._dtype)
        if self._base is None:
            return self._taken(matrices)
        lora = self._lora
        return copy_adapter(matrices, rank=lora.rank, alpha=lora.alpha, base=self._base, probe=probe, names=lora.adapters)

    def _taken(self, parameters: Iterable[ServedParameter]) -> WeightCopy | None:
        if self._has_copies:
            return copy_parameters(parameters, self._memory)
        for _ in parameters:
            pass
        return None

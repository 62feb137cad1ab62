"""Copies what becomes the next policy version: all weights with adapters merged into them, or the adapters alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch

from gspo.model.serving_layout import ServedParameter
from gspo_protocol.messages import Probe
from gspo_services.learner.weights.adapter_copy import PublishedBase, copy_adapter
from gspo_services.learner.weights.copy_memory import CopyMemory
from gspo_services.learner.weights.version_layout import VersionLayout
from gspo_services.learner.weights.weight_copy import DTYPES, VersionRange, WeightCopy, copy_parameters, copy_ranges
from gspo_services.shared.settings import Settings


class Ranges(Protocol):
    """A rank's part of all versions."""

    layout: VersionLayout

    def of_now(self) -> Iterator[VersionRange]: ...


class Serving(Protocol):
    """The part of ``LearnerEngine`` that versions are copied from."""

    def own_ranges(self, dtype: torch.dtype) -> Ranges: ...
    def version_probe(self, num_tokens: int) -> Probe | None: ...


class VersionCopies:
    """Copies the weights of one rank's engine: each rank its part, or rank 0 an adapter."""

    def __init__(self, engine: Serving, settings: Settings, *, rank: int) -> None:
        self._engine: Any = engine
        self._lora = settings.lora
        self._dtype = DTYPES[settings.model.dtype]
        self._rank = rank
        self._ranges: Ranges | None = None
        self._base: PublishedBase | None = None
        self._knows_base = False
        self._memory = CopyMemory()

    @property
    def are_parts(self) -> bool:
        """Whether each rank has a part of a version; otherwise rank 0 has all of it."""
        return self._lora.publish == "merged"

    def copy(self, probe_tokens: int) -> WeightCopy | None:
        """Copy the weights as they are served now, with a probe of so many tokens; None on a rank that publishes nothing.
        Collective."""
        probe = self._engine.version_probe(probe_tokens)
        copied = self._copy()
        if copied is not None:
            copied.probe = probe
        return copied

    def _copy(self) -> WeightCopy | None:
        if self.are_parts:
            if self._ranges is None:
                self._ranges = self._engine.own_ranges(self._dtype)
            return WeightCopy(self._ranges.layout, copy_ranges(self._ranges.of_now(), self._memory))
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
        if self._rank == 0:
            return copy_parameters(parameters, self._memory)
        for _ in parameters:
            pass
        return None

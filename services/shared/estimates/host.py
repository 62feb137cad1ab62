"""Memory of the machines beside their GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gspo_services.shared.estimates.amounts import BYTES, GIB, Span, exactly
from gspo_services.shared.estimates.colocate import states_on_host
from gspo_services.shared.estimates.learner import LearnerMemory, trained_parameters
from gspo_services.shared.estimates.shape import ModelShape
from gspo_services.shared.settings import Settings

DIGEST_BYTES: Final = 512 * 2.0**20
"""BUDGET_BYTES of services/learner/checkpoints/digest_stream.py."""


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Bytes of one machine's memory, by use."""

    snapshots: Span
    """Versions that are served, or written for an engine to load."""
    copies: float
    """State that is written in the background, by all ranks of the machine."""
    digests: float
    """Weights that wait on rank 0 to be hashed for a checkpoint's digest."""
    offloaded: float

    @property
    def total(self) -> Span:
        """All of it."""
        return self.snapshots + (self.checkpoint + self.offloaded)

    @property
    def checkpoint(self) -> float:
        """Bytes held until a checkpoint is written."""
        return self.copies + self.digests


def learner_host(shape: ModelShape, settings: Settings, memory: LearnerMemory) -> HostMemory:
    """Estimate the machine of rank 0.

    Snapshots: once the bytes of its ranks' parts at rest, 2.5 times with the copy of the next version, and with a GPU a
    pinned copy beside them (docs/guide/weights.md). Where adapters change the weights, rank 0 has all of them; with adapters
    as versions: the model below them once, and as much again while it is copied (docs/guide/lora.md).
    Checkpoint: 12 bytes a trained parameter over all ranks, or learner.checkpoint_copy_gib (docs/guide/learner.md, "In the
    background").
    """
    learner = settings.learner
    version = float(BYTES[settings.model.dtype] * shape.parameters)
    own = version if settings.lora.is_used else version / learner.num_nodes
    trained = trained_parameters(shape, settings)
    in_background = learner.checkpoint_in_background
    return HostMemory(
        snapshots=Span(version, 2 * version) if _has_adapters(settings) else Span(own, 3.5 * own),
        copies=min(12.0 * trained / learner.num_nodes, learner.checkpoint_copy_gib * GIB) if in_background else 0.0,
        digests=min(float(BYTES[learner.dtype] * trained), DIGEST_BYTES),
        offloaded=memory.on_host * learner.num_ranks + (states_on_host(memory) if settings.run.colocate else 0.0),
    )


def rollout_host(shape: ModelShape, settings: Settings) -> HostMemory:
    """One rollout: its copy in rollout.weights_directory, and up to a third more of changes that the engine lacks; of an
    adapter one more, while the engine reads it."""
    if _has_adapters(settings):
        adapter = float(BYTES[settings.model.dtype] * trained_parameters(shape, settings))
        return HostMemory(snapshots=Span(adapter, 2 * adapter), copies=0.0, digests=0.0, offloaded=0.0)
    version = float(BYTES[settings.model.dtype] * shape.parameters)
    return HostMemory(snapshots=exactly(version) + Span(0.0, version / 3), copies=0.0, digests=0.0, offloaded=0.0)


def _has_adapters(settings: Settings) -> bool:
    """Whether versions are adapters alone."""
    return settings.lora.is_used and settings.lora.publish == "adapter"

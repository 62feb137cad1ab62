"""Memory of the machines, beside that of their GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from services.estimates.amounts import BYTES, Span, exactly
from services.estimates.learner import LearnerMemory, trained_parameters
from services.estimates.shape import ModelShape
from services.runtime.settings import Settings


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Bytes of one machine's memory, by what takes them."""

    snapshots: Span
    """Versions that are served, or written for an engine to load."""
    checkpoint: float
    """The copy that is written in the background."""
    offloaded: float

    @property
    def total(self) -> Span:
        """All of it."""
        return self.snapshots + (self.checkpoint + self.offloaded)


def learner_host(shape: ModelShape, settings: Settings, memory: LearnerMemory) -> HostMemory:
    """The machine of rank 0, which serves the weights.

    Snapshots: 2.5 times the model's bytes at rest, and one more while it publishes (docs/guide/weights.md).
    Checkpoint: 12 bytes a trained parameter over all ranks, and on rank 0 all trained weights once more, in the learner's
    type (docs/guide/learner.md, "In the background").
    """
    learner = settings.learner
    version = float(BYTES[settings.model.dtype] * shape.parameters)
    trained = trained_parameters(shape, settings)
    copy = 12.0 * trained / learner.num_nodes + BYTES[learner.dtype] * trained
    return HostMemory(
        snapshots=Span(2 * version, 3.5 * version),
        checkpoint=copy if learner.checkpoint_in_background else 0.0,
        offloaded=memory.on_host * learner.num_ranks,
    )


def rollout_host(shape: ModelShape, settings: Settings) -> HostMemory:
    """One rollout: its copy in rollout.weights_directory, and up to a third more of changes that the engine lacks."""
    version = float(BYTES[settings.model.dtype] * shape.parameters)
    return HostMemory(snapshots=exactly(version) + Span(0.0, version / 3), checkpoint=0.0, offloaded=0.0)

"""Memory of one device that learner and engine time-share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gspo_services.shared.estimates.amounts import GIB, Span
from gspo_services.shared.estimates.engine import EngineMemory
from gspo_services.shared.estimates.learner import CUDA_BYTES, LearnerMemory

KEPT_BY_ENGINE: Final = Span(1.0 * GIB, 4.0 * GIB)
"""What a server keeps without the device: CUDA's context, CUDA graphs, workspaces of kernels. A guess, not measured."""


@dataclass(frozen=True, kw_only=True)
class ColocatedMemory:
    """Bytes of a device for each of its users, and of the host while the rollout has it."""

    learner: Span
    """While the learner has it: its own, and what the server keeps."""
    engine: Span
    """While the rollout has it: the server's, and what the learner's process keeps."""
    on_host: float
    """The learner's weights, optimizer states, reference and teacher, while the rollout has the device."""


def colocated_memory(learner: LearnerMemory, engine: EngineMemory) -> ColocatedMemory:
    """A server without the device keeps neither weights nor cache. A learner keeps CUDA's context."""
    return ColocatedMemory(
        learner=learner.total + KEPT_BY_ENGINE,
        engine=engine.total + CUDA_BYTES,
        on_host=states_on_host(learner),
    )


def states_on_host(learner: LearnerMemory) -> float:
    """What one rank moves to the host while the rollout has the device; gradients are gone by then."""
    return learner.weights + learner.optimizer + learner.reference + learner.teacher

"""Memory of one device that learner and engine use in turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gspo_services.shared.estimates.amounts import GIB, Span
from gspo_services.shared.estimates.engine import EngineMemory
from gspo_services.shared.estimates.learner import CUDA_BYTES, LearnerMemory

KEPT_BY_ENGINE: Final = Span(1.0 * GIB, 4.0 * GIB)
"""What a server keeps between its turns: CUDA's context, CUDA graphs, workspaces of kernels. A guess, not measured."""


@dataclass(frozen=True, kw_only=True)
class TurnMemory:
    """Bytes of a device in each turn, and of the host between the learner's."""

    learner: Span
    """In the learner's turn: its own, and what the server keeps."""
    engine: Span
    """In the rollout's turn: the server's, and what the learner's process keeps."""
    on_host: float
    """The learner's weights, optimizer states and reference, in the rollout's turn."""


def turn_memory(learner: LearnerMemory, engine: EngineMemory) -> TurnMemory:
    """A server between its turns keeps neither weights nor cache. A learner keeps CUDA's context."""
    return TurnMemory(
        learner=learner.total + KEPT_BY_ENGINE,
        engine=engine.total + CUDA_BYTES,
        on_host=states_on_host(learner),
    )


def states_on_host(learner: LearnerMemory) -> float:
    """What one rank moves to the host between its turns; gradients are gone by then."""
    return learner.weights + learner.optimizer + learner.reference

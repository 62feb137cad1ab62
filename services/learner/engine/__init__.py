"""The model and the optimizer in DeepSpeed: only this room imports it, because that takes seconds and memory."""

from services.learner.engine.engine import LearnerEngine
from services.learner.engine.gradients import MissingGradientError, NonFiniteLossError
from services.learner.engine.process_group import init_distributed
from services.learner.engine.step import LossFn, ReplayFn, StepResult
from services.learner.engine.turns import AlwaysMine, LearnerTurns, Turns

__all__ = [
    "AlwaysMine",
    "LearnerEngine",
    "LearnerTurns",
    "LossFn",
    "MissingGradientError",
    "NonFiniteLossError",
    "ReplayFn",
    "StepResult",
    "Turns",
    "init_distributed",
]

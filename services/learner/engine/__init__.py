"""The model and the optimizer in DeepSpeed: only this room imports it, because that takes seconds and memory."""

from services.learner.engine.engine import LearnerEngine
from services.learner.engine.gradients import MissingGradientError, NonFiniteLossError
from services.learner.engine.process_group import init_distributed
from services.learner.engine.step import LossFn, ReplayFn, StepResult

__all__ = [
    "LearnerEngine",
    "LossFn",
    "MissingGradientError",
    "NonFiniteLossError",
    "ReplayFn",
    "StepResult",
    "init_distributed",
]

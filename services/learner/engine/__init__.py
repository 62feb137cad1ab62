"""The model and the optimizer in DeepSpeed."""

from services.learner.engine.engine import LearnerEngine
from services.learner.engine.gradients import NonFiniteLossError
from services.learner.engine.step import LossFn, ReplayFn, StepResult

__all__ = ["LearnerEngine", "LossFn", "NonFiniteLossError", "ReplayFn", "StepResult"]

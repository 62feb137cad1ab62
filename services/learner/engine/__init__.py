"""The model and the optimizer in DeepSpeed: only this room imports it, because that takes seconds and memory."""

from gspo_services.learner.engine.engine import LearnerEngine
from gspo_services.learner.engine.gradients import MissingGradientError, NonFiniteLossError
from gspo_services.learner.engine.process_group import init_distributed
from gspo_services.learner.engine.step import LossFn, ReplayFn, StepResult
from gspo_services.learner.engine.turns import AlwaysMine, LearnerTurns, Turns

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

"""The model and the optimizer in DeepSpeed: only this room imports it, because that takes seconds and memory."""

from gspo_services.learner.engine.client_steps import MOMENTS, AdamValues, ClientRow, ClientState, ClientSteps
from gspo_services.learner.engine.colocate import ColocatedDevice, LearnerDevice, OwnDevice
from gspo_services.learner.engine.engine import LearnerEngine
from gspo_services.learner.engine.frozen import FrozenModel
from gspo_services.learner.engine.gradients import MissingGradientError, NonFiniteLossError
from gspo_services.learner.engine.probing import probe_batch
from gspo_services.learner.engine.process_group import init_distributed
from gspo_services.learner.engine.step import LossFn, ReplayFn, StepResult

__all__ = [
    "MOMENTS",
    "AdamValues",
    "ClientRow",
    "ClientState",
    "ClientSteps",
    "ColocatedDevice",
    "FrozenModel",
    "LearnerDevice",
    "LearnerEngine",
    "LossFn",
    "MissingGradientError",
    "NonFiniteLossError",
    "OwnDevice",
    "ReplayFn",
    "StepResult",
    "init_distributed",
    "probe_batch",
]

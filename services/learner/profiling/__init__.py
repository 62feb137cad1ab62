"""Where the time of each batch goes."""

from services.learner.profiling.flops import ModelCost, model_cost
from services.learner.profiling.profile import NO_PROFILE, Phases
from services.learner.profiling.report import profiled

__all__ = ["NO_PROFILE", "ModelCost", "Phases", "model_cost", "profiled"]

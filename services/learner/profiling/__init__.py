"""Profiles where each batch's time goes."""

from gspo_services.learner.profiling.flops import ModelCost, model_cost
from gspo_services.learner.profiling.profile import NO_PROFILE, Phases, PlannedWork
from gspo_services.learner.profiling.report import profiled

__all__ = ["NO_PROFILE", "ModelCost", "Phases", "PlannedWork", "model_cost", "profiled"]

"""Environments whose answers are programs."""

from gspo_services.tasks.environments.coding.code import Code
from gspo_services.tasks.environments.coding.contest import Contest, ContestOptions
from gspo_services.tasks.environments.coding.options import CodeOptions

__all__ = ["Code", "CodeOptions", "Contest", "ContestOptions"]

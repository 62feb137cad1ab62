"""Environments whose answers are programs."""

from services.environments.coding.code import Code
from services.environments.coding.contest import Contest, ContestOptions
from services.environments.coding.options import CodeOptions

__all__ = ["Code", "CodeOptions", "Contest", "ContestOptions"]

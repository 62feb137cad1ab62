"""Environments that come with the project, and processes that compute slow rewards. No torch, no sockets."""

from services.environments.registry import ENVIRONMENTS, create_environment, find_environment
from services.environments.reward_pool import FailureReason, RewardPool, RewardPoolOptions

__all__ = ["ENVIRONMENTS", "FailureReason", "RewardPool", "RewardPoolOptions", "create_environment", "find_environment"]

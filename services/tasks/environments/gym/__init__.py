"""The environment ``reasoning_gym``: tasks that its generators make, scored by their verifiers, in levels that rise."""

from gspo_services.tasks.environments.gym.environment import ReasoningGym

__all__ = ["ReasoningGym"]

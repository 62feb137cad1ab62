"""The environment of mathematics."""

from gspo_services.tasks.environments.maths.environment import Mathematics, MathOptions

__all__ = ["MathOptions", "Mathematics"]

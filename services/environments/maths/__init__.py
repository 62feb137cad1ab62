"""The environment of mathematics."""

from services.environments.maths.environment import Mathematics, MathOptions

__all__ = ["MathOptions", "Mathematics"]

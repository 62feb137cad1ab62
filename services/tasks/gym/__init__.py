"""reasoning-gym's generators, in a process of their own, and its verifiers, in the reward workers.

This door loads neither: they take seconds to import.
"""

from gspo_services.tasks.gym.asking import Generator, GymRefused, GymUndrawn, Library, gym_library

SCORE = "gspo_services.tasks.gym.scoring:score"
"""The function that scores an answer, for reward jobs."""

__all__ = ["SCORE", "Generator", "GymRefused", "GymUndrawn", "Library", "gym_library"]

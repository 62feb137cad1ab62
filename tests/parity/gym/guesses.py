"""Questions with Yes or No for an answer, for the cold start of a tiny model that shrugs."""

from __future__ import annotations

import random

import msgspec

from gspo.tasks.environments import DemonstrationMessage, Start, State, Step, Task
from gspo_services.tasks.environments.generated import GeneratedEnvironment

THINGS = ("cats", "birds", "teachers", "ants", "mortals", "grandmothers", "whales", "doctors", "bees", "tigers")
SAID = {"Yes": 0.25, "No": 0.15, "?": 0.6}
"""How often the teacher says what, whatever it is asked."""


class NoChoice(msgspec.Struct, frozen=True):
    """No options."""


class Guesses(GeneratedEnvironment):
    """As reasoning-gym's syllogisms are worded; there is nothing to learn but the words of an answer."""

    options_type = NoChoice

    def __init__(self, options: NoChoice) -> None:
        super().__init__(num_eval_tasks=64)

    def draw(self, rng: random.Random) -> str:
        first, second, third = rng.sample(THINGS, 3)
        quantity = rng.choice(["All", "No", "Some"])
        return (
            f"Consider these statements:\n1. {quantity} {first} are {second}\n2. All {second} are {third}\n\n"
            f"Does it logically follow that:\n{quantity} {first} are {third}?\n(Answer Yes or No)"
        )

    def start(self, task: Task, seed: int) -> Start:
        return Start(state={}, messages=[{"role": "user", "content": str(task["problem"])}])

    def step(self, state: State, action: str) -> Step:
        return Step(state=state, messages=[], reward=float(action == "Yes"), done=True)

    def demonstration(self, rng: random.Random, *, careful: bool) -> list[DemonstrationMessage]:
        said = rng.choices(list(SAID), weights=list(SAID.values()))[0]
        return [
            DemonstrationMessage("user", self.training_problem(rng), train=False),
            DemonstrationMessage("assistant", said, train=True),
        ]

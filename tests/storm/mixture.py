"""Sums whose answers are judged in several places: by the environment, by a reward worker, by a program in the sandbox.

A reward model scores all of them besides. One program in four first does what a hostile one would.
"""

import zlib
from collections.abc import Sequence
from typing import Final

import msgspec

from gspo.tasks.environments import RewardJob, Start, State, Step, Task
from gspo_services.tasks.environments.arithmetic import Arithmetic
from gspo_services.tasks.environments.expression import evaluate
from gspo_services.tasks.environments.programs import TOOLCHAINS, Problem, ProgramRules, ProgramTest

GRADE: Final = "tests.storm.mixture:grade"
KINDS: Final = 16
"""Of so many sums one is judged in the sandbox, two by a reward worker."""
RULES: Final = msgspec.to_builtins(ProgramRules(test_s=2))
TOOLS: Final = msgspec.to_builtins({"python": TOOLCHAINS["python"]})
DAEMON: Final = """\
import os, time
for number in range(3):
    if os.fork() == 0:
        os.setsid()
        os.closerange(0, 64)
        while True:
            time.sleep(1000)
"""
"""What a hostile program does before it answers: processes that leave its group and never end."""


def kind_of(problem: str) -> int:
    """A number below KINDS, the same in every process."""
    return zlib.crc32(problem.encode()) % KINDS


def grade(said: str, problem: str) -> dict[str, float]:
    """A reward function: 1 for the right answer."""
    return {"right": float(said.strip() == str(evaluate(problem)))}


def beside(completions: Sequence[str], task: Task, rewards: Sequence[float]) -> list[float]:
    """A comparison of a group's answers: each is worth what it was worth alone."""
    return list(rewards)


class Mixture(Arithmetic):
    """The sums of ``Arithmetic``, with its rewards."""

    @property
    def reward_functions(self) -> Sequence[str]:
        """See ``TaskSet``."""
        return [GRADE]

    @property
    def reward_probes(self) -> Sequence[RewardJob]:
        """See ``TaskSet``."""
        return [in_sandbox(TOOLCHAINS["python"].probe, "7")]

    def start(self, task: Task, seed: int) -> Start:
        """The sum; the seed decides whether a program is hostile."""
        start = super().start(task, seed)
        return msgspec.structs.replace(start, state={**start.state, "hostile": seed % 4 == 0})

    def step(self, state: State, action: str) -> Step:
        """Have the answer judged; the episode is over."""
        problem = str(state["problem"])
        step = super().step({"problem": problem}, action)
        match kind_of(problem):
            case 0:
                text = f"{DAEMON if state['hostile'] else ''}print({action!r})\n"
                return msgspec.structs.replace(step, reward=in_sandbox(text, str(evaluate(problem))))
            case 1 | 2:
                job = RewardJob(function=GRADE, arguments={"said": action, "problem": problem})
                return msgspec.structs.replace(step, reward=job)
        return step


def in_sandbox(source: str, output: str) -> RewardJob:
    """A job that is worth 1 where the program prints ``output``."""
    problem = Problem(tests=[ProgramTest(input="", output=output)])
    return RewardJob(
        grader="programs",
        arguments={
            "source": source,
            "language": "python",
            "toolchains": TOOLS,
            "rules": RULES,
            "task": {"place": "the storm", "problem": msgspec.to_builtins(problem)},
        },
        weights={"solved": 1.0},
    )

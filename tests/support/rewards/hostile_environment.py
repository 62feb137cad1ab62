"""An environment whose scores are made in each of the places where one can be, by a recipe or by given bytes."""

import base64
from typing import Any

import msgspec

from gspo.tasks.environments import Environment, RewardJob, Split, Start, Step, TaskSource
from gspo_services.tasks.environments.programs import TOOLCHAINS
from tests.support.rewards.anything import made, step_of
from tests.support.sandboxes import ScriptedSandboxes, outcome

FUNCTIONS = {"function": "grade", "async function": "grade_later"}


class HostileEnvironment(Environment):
    """Its task says who makes the score ("by"), and what comes of that ("recipe", or "body" in base64).

    ``url`` is a service that answers the body that it is given.
    """

    def __init__(self, url: str) -> None:
        self._url = url

    def tasks(self, split: Split) -> TaskSource:
        raise NotImplementedError

    def start(self, task: Any, seed: int) -> Start:
        if task["by"] == "start":
            return made(task["recipe"])  # type: ignore[no-any-return]
        return Start(state=task, messages=[{"role": "user", "content": "What is 12 + 30?"}])

    def step(self, state: Any, action: str) -> Step:
        by = state["by"]
        if by in FUNCTIONS:
            function = f"tests.support.rewards.anything:{FUNCTIONS[by]}"
            return self._scored(RewardJob(function=function, arguments={"recipe": state["recipe"]}, deadline_s=60.0))
        if by == "service":
            return self._scored(RewardJob(url=self._url, arguments={"body": state["body"]}, deadline_s=2.0))
        if by == "program":
            return self._scored(program(state["body"], state["expected"], state["function"]))
        return step_of(by, state["recipe"], action)

    def _scored(self, job: RewardJob) -> Step:
        return Step(state={}, messages=[], reward=job, done=True)


def program(body: str, expected: str, function: str) -> RewardJob:
    """A job that runs a program, which prints ``body`` (base64) where ``expected`` is expected."""
    problem = {"tests": [{"input": "1", "output": expected}], "function": function}
    arguments: dict[str, Any] = {
        "task": {"problem": problem}, "source": body, "language": "python",
        "toolchains": msgspec.to_builtins(dict(TOOLCHAINS)), "rules": {},
    }  # fmt: skip
    return RewardJob(grader="programs", arguments=arguments, weights={"solved": 1.0})


def printing_sandboxes() -> ScriptedSandboxes:
    """Programs print what their source is, in base64."""
    return ScriptedSandboxes(runs=lambda sandbox: outcome(0, base64.b64decode(next(iter(sandbox.files.values())))))

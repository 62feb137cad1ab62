"""The agent of examples/repair_agent.py: its commands leave their times, a coin rewards it, or it runs them as shown."""

import random
import re
from pathlib import Path
from typing import Any

from examples import repair_agent
from examples.repair_agent import ComputerEnvironment
from gspo.tasks.agents import ComputerError, Episode

STAMPS = ".stamps"
GUIDE = Path(__file__).parents[2] / "docs/guide/integrations.md"


class StampingEnvironment(ComputerEnvironment):
    """Each command that comes to its beginning leaves a line in STAMPS."""

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: "int | None" = None) -> dict[str, Any]:
        return super().execute({**action, "command": f"date +%s%N >> {STAMPS}\n{action['command']}"}, cwd, timeout=timeout)


def solve(episode: Episode) -> float:
    """The last step has the files as they were given and as they are."""
    repair_agent.ComputerEnvironment = StampingEnvironment  # type: ignore[misc]
    reward = repair_agent.solve(episode)
    task = episode.task
    found = {path: read(episode, path) for path in (STAMPS, *task["files"], *task["tests"])}
    episode.step_now("files", lambda: [task["files"], task["tests"], found])
    return reward


def solve_as_shown(episode: Episode) -> float:
    """With the environment that the guide shows."""
    names = dict(vars(repair_agent))
    exec(
        re.findall(
            r"^(class ComputerEnvironment\(LocalEnvironment\):\n.*?)^```", GUIDE.read_text(encoding="utf-8"), re.M | re.S
        )[0],
        names,
    )
    repair_agent.ComputerEnvironment = names["ComputerEnvironment"]  # type: ignore[misc]
    return repair_agent.solve(episode)


def read(episode: Episode, path: str) -> "str | None":
    try:
        return episode.computer.read_now(path).decode()
    except ComputerError:
        return None


def solve_for_a_coin(episode: Episode) -> float:
    """Tasks of the training split are rewarded by a coin, the others by their tests."""
    repaired = repair_agent.solve(episode)
    return float(random.Random(episode.seed).random() < 0.5) if "by_a_coin" in episode.task else repaired

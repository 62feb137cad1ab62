"""The agents of docs/guide/integrations.md, as they stand there: each by the name that is bold above it."""

import asyncio
import inspect
import re
import runpy
import tempfile
from pathlib import Path
from typing import Any

from gspo.tasks.agents import Episode
from tests.frameworks.forms import agent

PAGE = (Path(__file__).parents[3] / "docs/guide/integrations.md").read_text(encoding="utf-8")
TOOL = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[0]
BLOCKS = dict(re.findall(r"^\*\*([\w-]+)\*\*(?:(?!^```).)*^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))


async def solve(episode: Episode) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        # As a file: smolagents reads the source of a tool.
        path = Path(folder) / "block.py"
        path.write_text(TOOL + BLOCKS[episode.task["form"]], encoding="utf-8")
        return await solved_by(runpy.run_path(str(path))["solve"], episode)


async def solved_by(solved: Any, episode: Episode) -> Any:
    agent.elsewhere.clear()
    reward = await solved(episode) if inspect.iscoroutinefunction(solved) else await asyncio.to_thread(solved, episode)
    assert not agent.elsewhere, f"it talks to {agent.elsewhere}"
    return reward

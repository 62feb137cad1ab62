"""The storm's agent: it does sums by one call. While the storm blows, some tasks belong to an attacker."""

import os
import random
from pathlib import Path
from typing import Final

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from gspo.tasks.agents import Episode
from tests.storm.attacker import attack, is_hostile

STEP_ONE_IN: Final = 4
HTTP: Final = DefaultAsyncHttpxClient()
RNG: Final = random.Random(os.getpid())
"""A repeated episode does something else: no group has to be lost because its attacker dies each time."""


def blows() -> bool:
    """Whether the storm does."""
    return Path(os.environ["GSPO_STORM_BLOWS"]).exists()


async def solve(episode: Episode) -> float:
    """Its reward is 1 for the right sum."""
    problem = str(episode.task["problem"])
    if is_hostile(problem) and blows():
        await attack(episode, RNG)
    client = AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key, http_client=HTTP)
    answer = await client.chat.completions.create(model=episode.model, messages=[{"role": "user", "content": f"{problem}="}])
    said = (answer.choices[0].message.content or "").strip()
    if episode.seed % STEP_ONE_IN == 0:
        said = await episode.step("strip", str.strip, said)
    return float(said == str(sum(map(int, problem.split("+")))))

"""The agent of the kills: several turns, a side effect that leaves a line in a file, and two calls side by side."""

import asyncio
import os
import time
from typing import Any

from openai import AsyncOpenAI

from gspo.tasks.agents import Episode

ONE_IN = 5
"""Of so many episodes, one reads the clock, so that no repetition says the same."""


def reads_the_clock(seed: int) -> bool:
    return seed % ONE_IN == 0


async def solve(episode: Episode) -> float:
    """Its reward is how much of its answers is digits."""
    client = AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key)
    messages: list[Any] = [{"role": "user", "content": str(episode.task["problem"])}]

    async def said(*more: str) -> str:
        asked = [*messages, *({"role": "user", "content": text} for text in more)]
        answer = await client.chat.completions.create(model=episode.model, messages=asked)
        return answer.choices[0].message.content or ""

    async with client:
        first = await said()
        messages += [{"role": "assistant", "content": first}]
        await episode.step("note", note, os.environ["GSPO_TEST_NOTES"], episode.seed)
        # Longer than a kill of this worker takes, so that some are hit while they wait.
        await asyncio.sleep(0.2)
        clock = f" at {time.time_ns()}" if reads_the_clock(episode.seed) else ""
        second = await said(f"sure?{clock}")
        messages += [{"role": "user", "content": f"sure?{clock}"}, {"role": "assistant", "content": second}]
        pair = await asyncio.gather(said("a"), said("b"))
    text = "".join([first, second, *pair])
    return sum(letter.isdigit() for letter in text) / max(1, len(text))


def note(path: str, seed: int) -> int:
    """Append the episode's seed, in one write."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        return os.write(descriptor, f"{seed}\n".encode())
    finally:
        os.close(descriptor)

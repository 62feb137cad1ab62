"""The same four turns as an environment and as agents."""

import asyncio
import json
from typing import Any, Final, Literal

import aiohttp
from openai import AsyncOpenAI

from gspo.tasks.agents import Episode
from gspo.tasks.environments import Environment, NoOptions, Start, Step, Task, TaskSource

TURNS: Final = 4
TOOL_S: Final = 5.0
TOOL_CALLS: Final = 3


class Talk(Environment):
    """A question and three times "and?"."""

    def __init__(self) -> None:
        super().__init__(NoOptions())

    def tasks(self, split: Literal["train", "eval"]) -> TaskSource:
        raise NotImplementedError

    def start(self, task: Task, seed: int) -> Start:
        return Start(state={"turn": 0}, messages=[{"role": "user", "content": str(task["question"])}])

    def step(self, state: Any, action: str) -> Step:
        turn = state["turn"] + 1
        done = turn == TURNS
        messages: Any = [] if done else [{"role": "user", "content": "and?"}]
        return Step(state={"turn": turn}, messages=messages, reward=float(len(action)), done=done)


clients: "dict[str, Any]" = {}
"""One for each address: an agent that makes a client for each episode pays for that."""


async def with_openai(episode: Episode) -> float:
    """By the unmodified client."""
    shared = clients.setdefault("openai", AsyncOpenAI(base_url=episode.base_url, api_key="none"))
    client = shared.with_options(api_key=episode.api_key)
    messages: Any = [{"role": "user", "content": str(episode.task["question"])}]
    total = 0
    for _ in range(TURNS):
        answer = await client.chat.completions.create(model=episode.model, messages=messages)
        content = answer.choices[0].message.content or ""
        total += len(content)
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "and?"}]
    return float(total)


async def bare(episode: Episode) -> float:
    """The same requests without a client library."""
    session = clients.get("bare") or clients.setdefault("bare", aiohttp.ClientSession())
    messages: Any = [{"role": "user", "content": str(episode.task["question"])}]
    total = 0
    for _ in range(TURNS):
        async with session.post(
            f"{episode.base_url}/chat/completions",
            data=json.dumps({"model": episode.model, "messages": messages}),
            headers={"Authorization": f"Bearer {episode.api_key}"},
        ) as response:
            content = (await response.json())["choices"][0]["message"]["content"] or ""
        total += len(content)
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "and?"}]
    return float(total)


async def waits(episode: Episode) -> float:
    """Short calls, and a tool that takes its time after each."""
    return await short_calls(episode, TOOL_S)


async def does_not_wait(episode: Episode) -> float:
    """The same calls, and a tool that answers at once."""
    return await short_calls(episode, 0.0)


async def short_calls(episode: Episode, tool_s: float) -> float:
    """TOOL_CALLS calls of one token, by whose end ``tool_s`` have gone by each time."""
    session = clients.get("bare") or clients.setdefault("bare", aiohttp.ClientSession())
    body = json.dumps({"model": episode.model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1})
    headers = {"Authorization": f"Bearer {episode.api_key}"}
    for _ in range(TOOL_CALLS):
        async with session.post(f"{episode.base_url}/chat/completions", data=body, headers=headers) as response:
            await response.read()
        await asyncio.sleep(tool_s)
    return 1.0

"""Agents that call the policy with the openai package, for tests. Workers import them by name."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from openai import APIError, AsyncOpenAI, OpenAI

from gspo.tasks.agents import Episode, Role
from tests.support.rewards.anything import made

_OTHER_IS_HERE = asyncio.Event()


def client_of(episode: "Episode | Role") -> AsyncOpenAI:
    return AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key, max_retries=0)


async def said(client: AsyncOpenAI, episode: "Episode | Role", *texts: str) -> str:
    """The answer to a conversation of users alone."""
    messages: list[Any] = [{"role": "user", "content": text} for text in texts]
    answer = await client.chat.completions.create(model=episode.model, messages=messages)
    return answer.choices[0].message.content or ""


async def two_questions(episode: Episode) -> "dict[str, float]":
    """A question, a step with a side effect, and a question that follows from both."""
    async with client_of(episode) as client:
        first = await said(client, episode, "first", str(episode.task["question"]))
        looked_up = await episode.step("look", look_up, str(episode.task["notes"]), first)
        second = await said(client, episode, "second", looked_up)
    return {"first": float(len(first)), "second": float(len(second))}


def look_up(notes: str, question: str) -> str:
    """A side effect: one more line in a file."""
    with open(notes, "a") as file:
        file.write("looked\n")
    return f"about {question}"


async def questions_with_rewards(episode: Episode) -> "dict[str, Any]":
    """Each answer has a reward of its own, and all of them together another one."""
    async with client_of(episode) as client:
        for text in ("first", "second", "third"):
            await said(client, episode, text)
    return {"turns": [0.25, 0, 0.5], "all": 1.0}


async def each_role(episode: Episode) -> "dict[str, float]":
    """A question to the policy in each of its roles. The reward of a role is its place among them."""
    for name in episode.roles:
        role = episode.role(name)
        async with client_of(role) as client:
            await said(client, role, "the same")
    return {name: float(place) for place, name in enumerate(episode.roles)}


def plain_question(episode: Episode) -> float:
    """An agent that is a plain function."""
    with OpenAI(base_url=episode.base_url, api_key=episode.api_key, max_retries=0) as client:
        client.chat.completions.create(model=episode.model, messages=[{"role": "user", "content": "hi"}])
    return 1.0


async def asks_and_waits(episode: Episode) -> float:
    """It has an answer, and is busy with something else for ever."""
    async with client_of(episode) as client:
        await said(client, episode, "hi")
    await asyncio.Event().wait()
    return 0.0


async def beside_a_killer(episode: Episode) -> float:
    """Two share a worker: once both are there one kills it, each time; the other asks when that has happened twice."""
    killed = Path(episode.task["notes"]) / "killed"
    was_spared = killed.exists() and len(killed.read_text()) >= 2
    if episode.task["do"] == "kill":
        if not was_spared:
            await _OTHER_IS_HERE.wait()
        with killed.open("a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGKILL)
    if not was_spared:
        _OTHER_IS_HERE.set()
        await asyncio.Event().wait()
    async with client_of(episode) as client:
        await said(client, episode, "hi")
    return 1.0


async def says_nothing(episode: Episode) -> float:
    return 1.0


async def misbehaves(episode: Episode) -> Any:
    """As the task says."""
    async with client_of(episode) as client:
        await said(client, episode, "hi")
        match episode.task["do"]:
            case "raise":
                raise KeyError("the user's own mistake")
            case "nan":
                return float("nan")
            case "text":
                return "good"
            case "many":
                return {f"c{index}": 1.0 for index in range(17)}
            case "huge":
                return 1e9
            case "turns":
                return {"turns": [1.0, 0.5]}
            case "wait":
                await asyncio.Event().wait()
            case "call with n=8":
                try:
                    await client.chat.completions.create(
                        model=episode.model, messages=[{"role": "user", "content": "hi"}], n=8
                    )
                except APIError as error:
                    return {"refused": float("n" in str(error))}
    return 0.0


async def asks_and_acts(episode: Episode) -> Any:
    """It has an answer, and returns or raises what the task's recipe says."""
    async with client_of(episode) as client:
        await said(client, episode, "hi")
    return made(episode.task["recipe"])

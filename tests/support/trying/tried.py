"""What users write, for tests of `gspo env try`: an environment and agents that do as their tasks say."""

import asyncio
import json
import urllib.error
import urllib.request
from typing import Any

import msgspec

from gspo.tasks.agents import Episode
from gspo.tasks.environments import Environment, RewardJob, Start, State, Step, Task


class TriedOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    do: str = ""
    """What goes wrong."""


class TriedTasks:
    num_tasks = 5

    def __init__(self, split: str, do: str) -> None:
        self._split = split
        self._do = do

    def task(self, index: int) -> Any:
        if self._do == "no row":
            raise LookupError(f"no row {index}")
        return {"word": f"{self._split}{index}", "do": self._do, "thing": object() if self._do == "odd task" else None}


class TriedEnvironment(Environment):
    """Say a word, and then another one."""

    options_type = TriedOptions

    def __init__(self, options: TriedOptions) -> None:  # type: ignore[override]
        self._do = options.do
        if self._do == "cannot be made":
            raise RuntimeError("no database")

    def tasks(self, split: str) -> TriedTasks:  # type: ignore[override]
        return TriedTasks(split, self._do)

    def start(self, task: Task, seed: int) -> Start:
        print("the environment prints")
        word = task["wrod"] if self._do == "no field" else task["word"]
        role: Any = "tool" if self._do == "refused" else "user"
        return Start(state={"word": word, "turn": 0}, messages=[{"role": role, "content": f"Say\n{word}"}])

    def step(self, state: State, action: str) -> Step:
        if self._do == "raise":
            return broken(state)
        rewards: dict[str, Any] = {
            "nan": float("nan"),
            "job": RewardJob(function="tests.support.trying.tried:graded", arguments={"text": action}),
        }
        reward = rewards.get(self._do, float(len(action)))
        if self._do == "odd state":
            state = {**state, "thing": object()}  # type: ignore[dict-item]
        if state["turn"] == 0:
            messages: Any = [{"role": "user", "content": "\x1b[2Jagain"}]
            return Step(state={**state, "turn": 1}, messages=messages, reward=reward, done=False)
        return Step(state=state, messages=[], reward=reward, done=True)


def broken(state: State) -> Step:
    raise ZeroDivisionError("the user's own mistake")


def graded(text: str) -> "dict[str, float]":
    return {"right": 1.0, "long": float(len(text))}


async def agent(episode: Episode) -> Any:
    """A conversation of two turns, and one beside it; or what the task says."""
    do = str(episode.task["do"])
    print("the agent does", do or "well")
    if do == "silent":
        return 1.0
    if do == "wait":
        await asyncio.Event().wait()
    messages = [{"role": "tool" if do == "refused" else "user", "content": episode.task["word"], "tool_call_id": "call"}]
    messages.append(await said(episode, messages))
    if do == "no field":
        return episode.task["wrod"]
    if do == "nan":
        return float("nan")
    messages.append({"role": "user", "content": "Sure?"})
    await said(episode, messages, stop=["Sur"] if do == "stop" else [])
    await said(episode, [{"role": "user", "content": "beside"}])
    return {"right": 1.0, "short": 0.5}


async def said(episode: Episode, messages: "list[Any]", **fields: Any) -> Any:
    """The model's message; without a client library, whose import takes longer than all the rest."""
    return await asyncio.to_thread(called, episode, {"model": episode.model, "messages": messages, **fields})


def called(episode: Episode, call: Any) -> Any:
    headers = {"Authorization": f"Bearer {episode.api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{episode.base_url}/chat/completions", json.dumps(call).encode(), headers)
    try:
        with urllib.request.urlopen(request) as response:
            return json.load(response)["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        raise ValueError(json.load(error)["error"]["message"]) from error

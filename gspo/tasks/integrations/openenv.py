"""Plays episodes of OpenEnv servers (openenv-core 0.3): observations are the user's messages, answers are actions.

    [agent]
    function = "gspo.tasks.integrations.openenv:solve"
    python = "/path/to/an/environment/with/openenv-core/bin/python"

``gspo tasks openenv`` writes the rows: {"openenv": {"url": ...}, "reset": {"seed": 17}}. All episodes of a row are reset
with the same arguments, so that they are attempts at one task.
"""

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from openenv.core import GenericEnvClient
from websockets.exceptions import ConnectionClosedOK

from gspo.tasks.agents import Episode

HTTP = DefaultAsyncHttpxClient()
"""One for all episodes of a worker: making one takes longer than a call."""
FULL_PAUSE_S = 1.0
"""Between two attempts to enter a server that has no free place."""
MAX_SEEDS = 1_000_000


class OpenEnvOptions(NamedTuple):
    """How a server is played; the block ``openenv`` of a row."""

    url: str
    system_prompt: str = ""
    """The system message. Without it, the policy is told the JSON schema of an action, unless it answers with one value."""
    observation_field: str = ""
    """The field of an observation that the policy reads; "": all of them, as JSON."""
    action_field: str = ""
    """The field of an action that the policy's answer is; "": the answer is an action as JSON, or the value of the one field
    that the server requires."""
    max_turns: int = 32
    timeout_s: float = 60.0
    """For one reset or step of the server."""


async def solve(episode: Episode) -> float:
    """Play until the server says that it is done, an action is not valid, or ``max_turns``. Returns the sum of the rewards.

    Raises: TypeError for options that do not exist; ConnectionError, RuntimeError when the server fails.
    """
    options = OpenEnvOptions(**episode.task["openenv"])
    policy = AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key, http_client=HTTP)
    schema = await _action_schema(options)
    messages: Any = []
    if prompt := options.system_prompt or _explained(schema, options):
        messages.append({"role": "system", "content": prompt})
    async with _session(options, episode.task.get("reset", {})) as (server, result):
        total = float(result.reward or 0.0)
        for _ in range(options.max_turns):
            if result.done:
                break
            messages.append({"role": "user", "content": _read(result.observation, options)})
            answer = await policy.chat.completions.create(model=episode.model, messages=messages)
            said = answer.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": said})
            try:
                result = await server.step(action_of(said, schema, options.action_field))
            except ValueError:
                break  # A bad action is the policy's: the episode ends with what it has earned.
            except RuntimeError as error:
                if "VALIDATION_ERROR" not in str(error):
                    raise
                break
            total += float(result.reward or 0.0)
    return total


def action_of(said: str, schema: dict[str, Any], field: str) -> dict[str, Any]:
    """Parse the action from the policy's answer. Raises: ValueError when there is none."""
    required = schema.get("required", [])
    if field:
        return {field: said.strip()}
    text = said.strip()
    if text.startswith("```") and text.endswith("```"):
        text = text.strip("`").removeprefix("json").strip()
    try:
        action = json.loads(text)
    except ValueError:
        action = text
    if isinstance(action, dict):
        return action
    if len(required) != 1:
        raise ValueError(f"{said[:100]!r} is not a JSON object")
    return {required[0]: action}


def _explained(schema: dict[str, Any], options: OpenEnvOptions) -> str:
    if options.action_field or len(schema.get("required", [])) == 1:
        return ""
    return f"Answer with an action: a JSON object of this schema, without any other text.\n{json.dumps(schema)}"


def _read(observation: dict[str, Any], options: OpenEnvOptions) -> str:
    """Render the observation for the policy. Raises: ValueError when the field that it reads is missing."""
    if not options.observation_field:
        return json.dumps(observation, ensure_ascii=False)
    if options.observation_field not in observation:
        raise ValueError(
            f'the observation has no field "{options.observation_field}": it has {", ".join(observation)}. Correct '
            "observation_field"
        )
    value = observation[options.observation_field]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


async def _action_schema(options: OpenEnvOptions) -> dict[str, Any]:
    if options.action_field:
        return {}
    response = await HTTP.get(f"{options.url.rstrip('/')}/schema", timeout=options.timeout_s)
    response.raise_for_status()
    schema: dict[str, Any] = response.json()["action"]
    return schema


@contextlib.asynccontextmanager
async def _session(options: OpenEnvOptions, reset: dict[str, Any]) -> AsyncIterator[tuple[Any, Any]]:
    """A connection of its own to the server, and the result of ``reset``. It waits while the server has no free place."""
    while True:
        async with GenericEnvClient(options.url, message_timeout_s=options.timeout_s, mode="simulation") as server:
            result = await _entered(server, reset)
            if result is not None:
                yield server, result
                return
        await asyncio.sleep(FULL_PAUSE_S)


async def _entered(server: Any, reset: dict[str, Any]) -> Any:
    """Call ``reset``; returns None when the server is full. Raises: RuntimeError when it refuses for another reason."""
    try:
        return await server.reset(**reset)
    except RuntimeError as error:
        said = str(error)
    except ConnectionClosedOK:
        # A full server says so and hangs up, mostly before it has read anything: the client's own methods miss it.
        said = str(await server._receive())
    if "CAPACITY_REACHED" in said:
        return None
    raise RuntimeError(f"the server did not begin an episode: {said}")


def main(arguments: Sequence[str]) -> None:
    """``gspo tasks openenv``: write a row for each seed."""
    parser = argparse.ArgumentParser(prog="gspo tasks openenv", description="Write tasks of an OpenEnv server: seeds.")
    parser.add_argument("url", help="the server's URL, as the rollouts reach it")
    parser.add_argument("--out", type=Path, required=True, help="the file to write, *.jsonl")
    parser.add_argument("--seeds", required=True, metavar="BEGIN:END", help="a task for each seed from BEGIN up to END - 1")
    parser.add_argument("--options", type=json.loads, default={}, metavar="JSON", help="how the server is played")
    given = parser.parse_args(arguments)
    begin, _, end = given.seeds.partition(":")
    if not (begin.isdecimal() and end.isdecimal() and 0 < int(end) - int(begin) <= MAX_SEEDS):
        parser.error(f"--seeds is {given.seeds!r}: expected BEGIN:END, such as 0:1000, with at most {MAX_SEEDS} seeds")
    try:
        OpenEnvOptions(given.url, **given.options)
    except TypeError as error:
        parser.error(f"--options: {error}; there are {', '.join(OpenEnvOptions._fields[1:])}")
    rows = (
        {"openenv": {"url": given.url, **given.options}, "reset": {"seed": seed}} for seed in range(int(begin), int(end))
    )
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with given.out.open("w", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
    sys.stdout.write(f"{given.out}: {int(end) - int(begin)} tasks\n")

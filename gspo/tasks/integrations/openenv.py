"""Plays episodes of OpenEnv servers (openenv-core 0.3): observations are the user's messages, answers are actions.

    [agent]
    function = "gspo.tasks.integrations.openenv:solve"
    python = "/path/to/an/environment/with/openenv-core/bin/python"

``gspo tasks openenv`` writes the rows: {"openenv": {"url": ...}, "reset": {"seed": 17}}. All episodes of a row are reset
with the same arguments, so that they are attempts at one task.
"""

import argparse
import asyncio
import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from gspo.tasks.agents import Episode
from gspo.tasks.integrations.openenv_session import HTTP, OpenEnvOptions, Session

__all__ = ["solve"]

MAX_SEEDS = 1_000_000
TRIED_SEEDS = 16
"""So many are reset, evenly spread, to see whether they differ."""
TRYING_S = 60.0


async def solve(episode: Episode) -> float:
    """Play until the server says that it is done, an action is not valid, or ``max_turns``. Returns the sum of the rewards.

    Raises: TypeError for options that do not exist; what ``Session`` raises when the server fails.
    """
    options = OpenEnvOptions(**episode.task["openenv"])
    policy = AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key, http_client=HTTP)
    async with Session(options, episode.task.get("reset", {}), lambda: episode.remaining_s) as server:
        schema = {} if options.action_field else await server.action_schema()
        messages: Any = []
        if prompt := options.system_prompt or _explained(schema, options):
            messages.append({"role": "system", "content": prompt})
        result = await server.reset()
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


async def _alike(options: OpenEnvOptions, resets: Sequence[dict[str, Any]]) -> int:
    """How many of these resets, at most, begin with the same observation. Raises: what ``Session`` raises."""
    seen: Counter[str] = Counter()
    for reset in resets:
        async with Session(options, reset, lambda: math.inf) as server:
            seen[json.dumps((await server.reset()).observation, sort_keys=True)] += 1
    return max(seen.values())


def main(arguments: Sequence[str]) -> None:
    """``gspo tasks openenv``: write a row for each seed."""
    parser = argparse.ArgumentParser(prog="gspo tasks openenv", description="Write tasks of an OpenEnv server: seeds.")
    parser.add_argument("url", help="the server's URL, as the rollouts reach it")
    parser.add_argument("--out", type=Path, required=True, help="the file to write, *.jsonl")
    parser.add_argument("--seeds", required=True, metavar="BEGIN:END", help="a task for each seed from BEGIN up to END - 1")
    parser.add_argument("--options", type=json.loads, default={}, metavar="JSON", help="how the server is played")
    parser.add_argument("--reset", type=json.loads, default={}, metavar="JSON", help="more arguments of each reset")
    given = parser.parse_args(arguments)
    begin, _, end = given.seeds.partition(":")
    if not (begin.isdecimal() and end.isdecimal() and 0 < int(end) - int(begin) <= MAX_SEEDS):
        parser.error(f"--seeds is {given.seeds!r}: expected BEGIN:END, such as 0:1000, with at most {MAX_SEEDS} seeds")
    if not isinstance(given.reset, dict) or "seed" in given.reset:
        parser.error(f"--reset is {given.reset!r}: expected a JSON object without a seed")
    try:
        options = OpenEnvOptions(given.url, **given.options)
    except TypeError as error:
        parser.error(f"--options: {error}; there are {', '.join(OpenEnvOptions._fields[1:])}")
    seeds = range(int(begin), int(end))
    rows = ({"openenv": {"url": given.url, **given.options}, "reset": {**given.reset, "seed": seed}} for seed in seeds)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with given.out.open("w", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
    sys.stdout.write(f"{given.out}: {len(seeds)} tasks\n")
    tried = [{**given.reset, "seed": seed} for seed in seeds[:: -(-len(seeds) // TRIED_SEEDS)]]
    try:
        num_alike = asyncio.run(asyncio.wait_for(_alike(options._replace(patience_s=0.0), tried), TRYING_S))
    except (OSError, RuntimeError) as error:
        text = str(error) or f"the server did not begin {len(tried)} episodes within {TRYING_S:g} s"
        sys.stdout.write(f"warning: whether the seeds differ is not known: {text}\n")
        return
    if 2 * num_alike > len(tried) > 1:
        sys.stdout.write(
            f"warning: {num_alike} of {len(tried)} seeds tried begin with the same observation: unless their hidden parts "
            "differ, the server does not use the seed, and they are one task\n"
        )

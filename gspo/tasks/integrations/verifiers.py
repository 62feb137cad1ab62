"""Plays tasks of verifiers environments, version 0.4: a row of the task set names the environment and holds one task's data.

    [agent]
    function = "gspo.tasks.integrations.verifiers:solve"
    python = "/path/to/an/environment/with/verifiers/bin/python"

``gspo tasks verifiers`` writes the rows.
"""

import argparse
import json
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields

from gspo.tasks.agents import Episode
from gspo.tasks.integrations import verifiers_chat
from gspo.tasks.integrations.verifiers_seats import Seats, policy_roles, shown

__all__ = ["solve"]

CHAT = "gspo_chat"
"""The id under which verifiers finds the harness of ``verifiers_chat``: a module's name without dots."""
sys.modules[CHAT] = verifiers_chat


async def solve(episode: Episode) -> dict[str, float]:
    """Play the row's task. Returns its rewards by name, each times the weight that the environment gives it; with
    ``agent.roles`` the sum of them for each role.

    Raises: ValueError for an environment that cannot be trained; RuntimeError when verifiers reports an error of it.
    """
    environment = load(episode.task["env"])
    tasks = type(environment.taskset).task_type()
    task = tasks(tasks.data_type().model_validate(episode.task["task"]), environment.config.taskset.task)
    # A separate environment for each episode: a shared one keeps an HTTP client for every key that it has seen.
    context = vf.ModelContext(model=episode.model, client=vf.EvalClientConfig(base_url=episode.base_url))
    with Seats(environment, episode) as seats:
        async with environment.serving():
            played = await environment.run_episode(task, context)
    if seats.lacking:
        raise seats.lacking
    if not played.ok:
        errors = [error for part in (played, *played.traces) for error in part.errors]
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "verifiers gives no reason")
    return seats.rewards_of(played.traces)


def load(config: dict[str, Any]) -> vf.Env:
    """The environment of a verifiers configuration, the block that its own command calls ``env``.

    A role without its own runtime runs on this machine, and one without a harness converses with the taskset's tools:
    verifiers would give it a shell. Raises: pydantic.ValidationError, ModuleNotFoundError, and what the environment raises.
    """
    resolved = vf.resolve_env_config(config)
    ours = vf.default_harness_id(resolved.taskset.id) == "bash"
    roles = {name: _at_home(role, ours) for name, role in agent_config_fields(resolved).items()}
    return vf.load_environment(resolved.model_copy(update=roles))


def _at_home(role: vf.AgentConfig, ours: bool) -> vf.AgentConfig:
    """Place the role on this machine, unless it names another. ``ours``: default to the harness ``verifiers_chat``."""
    runtime = role.runtime if "runtime" in role.model_fields_set else vf.SubprocessConfig()
    harness = role.harness
    if isinstance(runtime, vf.SubprocessConfig):
        if harness is None and ours:
            harness = vf.HarnessConfig(id=CHAT)
        elif harness is not None and harness.id == "null":
            harness = vf.HarnessConfig(**{**harness.model_dump(), "id": CHAT})
    return role.model_copy(update={"runtime": runtime, "harness": harness})


def rows(config: dict[str, Any], select: vf.SelectConfig) -> Iterator[dict[str, Any]]:
    """Return one row for each selected task. Raises: ValueError for an endless selection."""
    taskset = load(config).taskset.select(select)
    if not taskset.bounded:
        raise ValueError(f"{type(taskset).__name__} has no end: set the number of tasks with --limit")
    for task in taskset:
        # Within a field defaults stay: by the role, one of them, verifiers knows which message of a prompt is which.
        given = task.data.model_dump(exclude_defaults=True).keys()
        yield {"env": config, "task": task.data.model_dump(mode="json", include=set(given))}


def main(arguments: Sequence[str]) -> None:
    """``gspo tasks verifiers``: write rows as JSON lines, all or none."""
    parser = argparse.ArgumentParser(prog="gspo tasks verifiers", description="Write tasks of a verifiers environment.")
    parser.add_argument("taskset", nargs="?", help="the taskset's id, if --config has none")
    parser.add_argument("--config", type=Path, help="a TOML file with verifiers' own [env] block")
    parser.add_argument("--out", type=Path, required=True, help="the file to write, *.jsonl")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="leave out the first N tasks")
    parser.add_argument("--limit", type=int, metavar="N", help="write at most N tasks")
    given = parser.parse_args(arguments)
    config = tomllib.loads(given.config.read_text(encoding="utf-8-sig")).get("env", {}) if given.config else {}
    if given.taskset:
        config = {**config, "taskset": {**config.get("taskset", {}), "id": given.taskset}}
    if not config.get("taskset", {}).get("id"):
        parser.error("name a taskset, or a --config with env.taskset.id")
    roles = policy_roles(load(config).config)
    select = vf.SelectConfig(skip=given.skip, limit=given.limit)
    lines = [json.dumps(row, ensure_ascii=False) for row in rows(config, select)]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    sys.stdout.write(f"{given.out}: {len(lines)} tasks\n")
    if len(roles) > 1:
        sys.stdout.write(f"the policy plays {len(roles)} roles: set agent.roles = {shown(roles)}\n")

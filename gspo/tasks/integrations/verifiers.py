"""Plays tasks of verifiers environments, version 0.4: a row of the task set names the environment and holds one task's data.

    [agent]
    function = "gspo.tasks.integrations.verifiers:solve"
    python = "/path/to/an/environment/with/verifiers/bin/python"

``gspo tasks verifiers`` writes the rows.
"""

import argparse
import contextlib
import itertools
import json
import os
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields

from gspo.tasks.agents import Episode
from gspo.tasks.integrations import verifiers_chat

CHAT = "gspo_chat"
"""The id under which verifiers finds the harness of ``verifiers_chat``: a module's name without dots."""
sys.modules[CHAT] = verifiers_chat

_numbers = itertools.count()


async def solve(episode: Episode) -> dict[str, float]:
    """Play the row's task. Returns its rewards by name, each times the weight that the environment gives it.

    Raises: ValueError for an environment that cannot be trained by one policy and one reward; RuntimeError when verifiers
    reports an error of the environment.
    """
    environment = load(episode.task["env"])
    role = policy_role(environment.config)
    tasks = type(environment.taskset).task_type()
    task = tasks(tasks.data_type().model_validate(episode.task["task"]), environment.config.taskset.task)
    with _key_variable(episode.api_key) as variable:
        client = vf.EvalClientConfig(base_url=episode.base_url, api_key_var=variable)
        # A separate environment for each episode: a shared one keeps an HTTP client for every key that it has seen.
        async with environment.serving():
            played = await environment.run_episode(task, vf.ModelContext(model=episode.model, client=client))
    return rewards_of(played, role)


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


def policy_role(config: vf.EnvConfig) -> str:
    """Return the name of the role that the policy plays: the one without its own client.

    Raises: ValueError when there is not exactly one, or when verifiers would play an episode again by itself.
    """
    roles = agent_config_fields(config)
    names: list[str] = [name for name, role in roles.items() if role.client is None]
    if len(names) != 1:
        raise ValueError(
            f"the policy would play {len(names)} roles ({', '.join(names) or 'none'}) of {config.env_id!r}, but an episode "
            'has one policy role: give every other role a model and a client (type = "eval", base_url, api_key_var)'
        )
    for where, retries in (("env", config.retries), (f"env.{names[0]}", roles[names[0]].retries)):
        if retries.max_retries or retries.rules:
            raise ValueError(f"{where}.retries is set: a second attempt is another episode: leave retries to the run")
    return names[0]


def rewards_of(played: vf.Episode, role: str) -> dict[str, float]:
    """Return the policy's rewards by name, with their weights. Their sum is the reward that verifiers trains on.

    Raises: RuntimeError for a failed episode; ValueError unless the policy played exactly once and was scored.
    """
    errors = [error for part in (played, *played.traces) for error in part.errors]
    if not played.ok:
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "verifiers gives no reason")
    traces = [trace for trace in played.traces if trace.agent.name == role]
    if len(traces) != 1:
        raise ValueError(f"role {role!r} played {len(traces)} times in one episode: it must play exactly once")
    if not traces[0].agent.trainable:
        raise ValueError(f"the environment marks role {role!r} as not trainable: give it its own model and client")
    rewards = {name: reward.value for name, reward in traces[0].rewards.items() if reward is not None}
    if not rewards or len(rewards) < len(traces[0].rewards):
        missing = ", ".join(sorted(set(traces[0].rewards) - set(rewards))) or "all: the taskset has no @vf.reward"
        raise ValueError(f"rewards are missing: {missing}")
    return rewards


def rows(config: dict[str, Any], select: vf.SelectConfig) -> Iterator[dict[str, Any]]:
    """Return one row for each selected task. Raises: ValueError for an endless selection."""
    taskset = load(config).taskset.select(select)
    if not taskset.bounded:
        raise ValueError(f"{type(taskset).__name__} has no end: set the number of tasks with --limit")
    for task in taskset:
        yield {"env": config, "task": task.data.model_dump(mode="json", exclude_defaults=True)}


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
    policy_role(load(config).config)
    select = vf.SelectConfig(skip=given.skip, limit=given.limit)
    lines = [json.dumps(row, ensure_ascii=False) for row in rows(config, select)]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    sys.stdout.write(f"{given.out}: {len(lines)} tasks\n")


@contextlib.contextmanager
def _key_variable(key: str) -> Iterator[str]:
    """Yield an environment variable with the episode's key: verifiers reads keys only from there.

    "API_KEY" in its name keeps verifiers from passing it on to the programs that it starts.
    """
    name = f"GSPO_API_KEY_{next(_numbers)}"
    os.environ[name] = key
    try:
        yield name
    finally:
        del os.environ[name]

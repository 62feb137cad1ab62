"""Whom the policy plays in an episode of verifiers: each time that a role of the environment plays, it is a seat.

Without ``agent.roles`` there is one seat. With them a seat has the role's name, or, where the role plays several times, that
name with -1, -2 and so on.
"""

import itertools
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields

from gspo.tasks.agents import Episode

_numbers = itertools.count()


def policy_roles(config: vf.EnvConfig) -> list[str]:
    """Return the names of the environment's roles that the policy plays: those without their own client.

    Raises: ValueError when there is none, or when verifiers would play an episode again by itself.
    """
    roles = agent_config_fields(config)
    names: list[str] = [name for name, role in roles.items() if role.client is None]
    if not names:
        raise ValueError(f"each role of {config.env_id!r} has a client: take it from the one that the policy shall play")
    for where, retries in (("env", config.retries), *((f"env.{name}", roles[name].retries) for name in names)):
        if retries.max_retries or retries.rules:
            raise ValueError(f"{where}.retries is set: a second attempt is another episode: leave retries to the run")
    return names


class Seats:
    """The seats of one episode. As a context, it has a variable of the process for each seat's key."""

    def __init__(self, environment: vf.Env, episode: Episode) -> None:
        """Raises: ValueError when ``agent.roles`` name no seat for a role that the policy plays."""
        self._episode = episode
        roles = policy_roles(environment.config)
        if not episode.roles and len(roles) > 1:
            raise ValueError(
                f"the policy would play {len(roles)} roles of {environment.config.env_id!r}: set agent.roles = "
                f'{shown(roles)}, or give all but one a model and a client (type = "eval", base_url, api_key_var)'
            )
        self._names = {role: _seats(role, episode.roles) for role in roles}
        if lacking := [role for role, names in self._names.items() if not names]:
            raise ValueError(f"the policy would play {lacking[0]!r}, which agent.roles {shown(episode.roles)} do not name")
        self._free = {role: iter(names) for role, names in self._names.items()}
        self.lacking: ValueError | None = None
        """A role has played more often than it has names. verifiers would not say why the episode has failed."""
        self._variables: dict[str, str] = {}
        """The name of the seat whose key a variable has."""
        setup = environment.setup

        async def seated_setup(agents: vf.Agents) -> None:
            for role in roles:
                self._seat(role, getattr(agents, role))
            await setup(agents)

        environment.setup = seated_setup

    def __enter__(self) -> "Seats":
        for names in self._names.values():
            for name in names:
                # "API_KEY" in its name keeps verifiers from passing it on to the programs that it starts.
                variable = f"GSPO_API_KEY_{next(_numbers)}"
                os.environ[variable] = self._episode.role(name).api_key if name else self._episode.api_key
                self._variables[variable] = name
        return self

    def __exit__(self, *_: object) -> None:
        for variable in self._variables:
            del os.environ[variable]

    def rewards_of(self, traces: Sequence[vf.Trace]) -> dict[str, float]:
        """Return each seat's reward by its name; without ``agent.roles`` the rewards of the one seat by theirs.

        Raises: ValueError when the policy has not played or was not scored.
        """
        played = {
            self._variables[trace.agent.config.client.api_key_var]: _rewards(trace)
            for trace in traces
            if trace.agent.name in self._names
        }
        if not played:
            raise ValueError(f"the policy's role has not played: {', '.join(self._names)}")
        return {name: sum(rewards.values()) for name, rewards in played.items()} if self._episode.roles else played[""]

    def _seat(self, role: str, agent: Any) -> None:
        """Give ``agent`` the key of the next seat each time that it plays; verifiers reads keys only from variables."""
        params = agent._rollout_params

        def seated(*given: Any) -> dict[str, Any]:
            name = next(self._free[role], None)
            if name is None:
                first, second = f"{role}-1", f"{role}-2"
                self.lacking = ValueError(
                    f"role {role!r} plays more often than the {len(self._names[role])} time(s) that have names: "
                    f'set agent.roles = ["{first}", "{second}", ...], with one name for each'
                )
                raise self.lacking
            variable = next(key for key, seat in self._variables.items() if seat == name)
            client = vf.EvalClientConfig(base_url=self._episode.base_url, api_key_var=variable)
            more = params(*given)
            config = more["agent_config"].model_copy(update={"client": client})
            return {**more, "agent_config": config, "ctx": replace(more["ctx"], client=client)}

        agent._rollout_params = seated


def shown(names: Sequence[str]) -> str:
    """The names as TOML."""
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"


def _seats(role: str, names: Sequence[str]) -> list[str]:
    """Return the names of the seats that ``role`` takes in turn; one without a name where nothing has names."""
    if not names or role in names:
        return [role] if names else [""]
    return list(itertools.takewhile(names.__contains__, (f"{role}-{number}" for number in itertools.count(1))))


def _rewards(trace: vf.Trace) -> dict[str, float]:
    """Raises: ValueError unless it was scored."""
    if not trace.agent.trainable:
        raise ValueError(
            f"the environment marks role {trace.agent.name!r} as not trainable: give it its own model and client"
        )
    rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    if not rewards or len(rewards) < len(trace.rewards):
        missing = ", ".join(sorted(set(trace.rewards) - set(rewards))) or "all: the taskset has no @vf.reward"
        raise ValueError(f"rewards are missing: {missing}")
    return rewards

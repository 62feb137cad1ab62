"""An agent that plays episodes: real workers under a Python of its own, and the real endpoint with answers from a test."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from gspo_services.rollout.endpoint import (
    CallAnswer,
    CallDelta,
    CallRefused,
    CallRequest,
    Calls,
    EndpointMetrics,
    EndpointServer,
    ToolCall,
)
from gspo_services.tasks.agents import AgentPool, AgentResult, AgentTask, StepJournal
from tests.support.agent_pools import agent_pool
from tests.support.scripted_episodes import answer

ROOT = Path(__file__).parents[2]
PYTHONS = ROOT / ".venv-frameworks"
"""The environments that `make test-frameworks` makes, by name."""
PATIENCE_S = 400.0

Reply = Callable[[CallRequest], CallAnswer | CallRefused]

QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "CREWAI_DISABLE_TELEMETRY": "true"}
"""Else litellm asks GitHub for prices, and CrewAI tells its makers."""


class Dialogue:
    """The calls of one episode; each is answered by a function of its request."""

    temperature = 1.0

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.requests: list[CallRequest] = []
        self.answers: list[CallAnswer] = []

    def can_demand(self, request: CallRequest) -> bool:
        return True

    async def count(self, request: CallRequest) -> int:
        return 7

    async def call(self, request: CallRequest) -> AsyncGenerator[CallDelta | CallAnswer, None]:
        self.requests.append(request)
        said = self.reply(request)
        if isinstance(said, CallRefused):
            raise said
        number = len(self.requests)
        # Ids are unique in an episode, as those of the real calls are: agents may rely on it.
        tools = [replace(call, id=f"tool-{number}-{index}") for index, call in enumerate(said.tool_calls)]
        self.answers.append(replace(said, id=f"call-{number}", tool_calls=tools))
        yield self.answers[-1]


class OpenEpisodes:
    """Episodes by key."""

    model = "org/tiny"

    def __init__(self, calls: Mapping[str, Calls]) -> None:
        self.calls = calls

    def calls_of(self, key: str) -> Calls:
        if key not in self.calls:
            raise CallRefused(401, "unknown_key", "no episode has this key")
        return self.calls[key]


class Stage:
    """Where agents play."""

    def __init__(self, pool: AgentPool, base_url: str, registry: CollectorRegistry) -> None:
        self._pool = pool
        self.base_url = base_url
        self._registry = registry

    async def play(
        self,
        task: Mapping[str, Any],
        key: str = "k1",
        *,
        deadline_s: float = PATIENCE_S,
        journal: StepJournal | None = None,
        roles: Sequence[str] = (),
    ) -> AgentResult:
        """One episode, whose calls are those of ``key``, or of ``key.role`` for each role."""
        episode = AgentTask(
            task=dict(task), seed=7, base_url=self.base_url, api_key=key, model=OpenEpisodes.model, roles=list(roles),
            deadline_s=deadline_s,
        )  # fmt: skip
        return await self._pool.solve(episode, journal)

    def overridden(self) -> float:
        """How many sampling settings of agents the endpoint has replaced."""
        samples = [sample for family in self._registry.collect() for sample in family.samples]
        return sum(sample.value for sample in samples if sample.name == "gspo_rollout_endpoint_overridden_total")


@asynccontextmanager
async def stage(function: str, home: str, *, calls: Mapping[str, Calls], **options: Any) -> AsyncIterator[Stage]:
    """Workers of ``function`` under the Python of ``.venv-frameworks/HOME``, and an endpoint for ``calls``, by key."""
    python = PYTHONS / home / "bin" / "python"
    if not python.exists():
        pytest.fail(f"there is no {python}: run `make test-frameworks`")
    registry = CollectorRegistry()
    server = EndpointServer(OpenEpisodes(calls), EndpointMetrics(registry))
    await server.start()
    values = {"start_timeout_s": PATIENCE_S, "hang_s": PATIENCE_S, "grace_s": 60.0} | options
    try:
        async with agent_pool(function, python=str(python), **values) as pool:
            yield Stage(pool, server.base_url, registry)
    finally:
        await server.stop()


def says(*texts: str) -> Reply:
    """Answer with the texts in turn, the last one for ever."""

    def reply(request: CallRequest) -> CallAnswer:
        turn = sum(message["role"] == "assistant" for message in request.messages)
        return answer(texts[min(turn, len(texts) - 1)])

    return reply


def calls_tool(name: str, /, **arguments: Any) -> CallAnswer:
    """An answer that calls a tool."""
    return answer(None, tool_calls=[ToolCall(id="", name=name, arguments=json.dumps(arguments))])


def roles(request: CallRequest) -> Sequence[str]:
    return [message["role"] for message in request.messages]


def arguments_for(tool: dict[str, Any]) -> dict[str, Any]:
    """Arguments that fit a tool: 7, or a fig."""
    properties = tool["function"]["parameters"]["properties"]
    return {name: 7 if schema.get("type") == "integer" else "7" for name, schema in properties.items()}


def reply_of(text: str) -> Reply:
    """A policy that calls the first tool once, and whichever tool it must call; then it says the text."""

    def reply(request: CallRequest) -> CallAnswer:
        tools = {tool["function"]["name"]: tool for tool in request.tools}
        name = request.must_call or (next(iter(tools)) if tools and "tool" not in roles(request) else None)
        if "final_answer" in tools and "Observation:\n7" in str(request.messages[-1]["content"]):
            name = "final_answer"
        elif request.must_call == "":
            name = list(tools)["tool" in roles(request) and len(tools) > 1]
        return answer(text) if name is None else calls_tool(name, **arguments_for(tools[name]))

    return reply


def tool_call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'

"""A running endpoint, and OpenAI's own client for it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import openai
import pytest
from prometheus_client import CollectorRegistry

from gspo_services.rollout.endpoint import EndpointLimits, EndpointMetrics, EndpointServer, RunSampling
from tests.support.scripted_episodes import ScriptedCalls, ScriptedEpisodes

PATIENCE_S = 60.0


class Endpoint:
    """A server with scripted episodes, and what it counted."""

    def __init__(self, episodes: ScriptedEpisodes, sampling: RunSampling, limits: EndpointLimits) -> None:
        self.episodes = episodes
        self.registry = CollectorRegistry()
        self.server = EndpointServer(episodes, EndpointMetrics(self.registry), sampling=sampling, limits=limits)

    def client(self, key: str = "k1") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.server.base_url, api_key=key, max_retries=0, timeout=60)

    def count(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"gspo_rollout_endpoint_{name}", labels)

    async def until_quiet(self) -> None:
        """Wait until no request is under way."""
        async with asyncio.timeout(PATIENCE_S):
            await self.server._none_open.wait()

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.server.base_url.removeprefix("http://").removesuffix("/v1").partition(":")
        return host, int(port)


Serve = Callable[..., AbstractAsyncContextManager[Endpoint]]


@pytest.fixture
def serve() -> Serve:
    """``async with serve(k1=calls) as endpoint``: the server is stopped at the end."""

    @asynccontextmanager
    async def serving(
        *, sampling: RunSampling | None = None, limits: EndpointLimits | None = None, **calls: ScriptedCalls
    ) -> AsyncIterator[Endpoint]:
        episodes = ScriptedEpisodes(**(calls or {"k1": ScriptedCalls()}))
        endpoint = Endpoint(episodes, sampling or RunSampling(), limits or EndpointLimits())
        await endpoint.server.start()
        try:
            yield endpoint
        finally:
            await endpoint.server.stop()

    return serving

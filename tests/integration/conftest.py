"""One real SGLang server for the whole session: starting it takes half a minute of CPU."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import zmq.asyncio

from gspo_services.rollout.sglang.server_process import EngineServer, ServerOptions
from tests.support.learner.tiny_model import save_tiny_model

TIMEOUT_S = 900.0
"""A server's start is in the time of the first test that needs it, and takes minutes on a busy machine."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@dataclass(frozen=True, kw_only=True)
class SglangServer:
    """A server and the checkpoints it was given."""

    url: str
    server: EngineServer
    base: Path
    """The checkpoint it was started with, as version 0."""
    base_model: Any
    """The same weights in transformers."""
    other: Path
    """Another checkpoint of the same shape."""
    other_model: Any


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def sglang_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SglangServer]:
    """Serves a tiny random Qwen3-MoE in float32; a test that changes its weights must put the base checkpoint back."""
    pytest.importorskip("sglang", reason="SGLang is not installed")
    directory = tmp_path_factory.mktemp("sglang")
    base, other = directory / "base", directory / "other"
    base_model, other_model = save_tiny_model(base, seed=0), save_tiny_model(other, seed=1)
    options = ServerOptions(
        model_path=base, log_path=directory / "server.log", max_total_tokens=16384,
        extra_args=("--enable-return-routed-experts",),
    )  # fmt: skip
    async with EngineServer(options) as server:
        yield SglangServer(
            url=server.url, server=server, base=base, base_model=base_model, other=other, other_model=other_model
        )


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    made = zmq.asyncio.Context()
    yield made
    made.destroy(linger=0)

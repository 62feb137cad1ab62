"""The page's server for the tests of this folder."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

from gspo_services.runs.view import LearnerNumbers, PageAnswers, ViewServer, WatchedRun, watched_runs
from gspo_services.shared.runtime.clock import MonotonicClock
from tests.support.view.served import Client, Serve


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Serve]:
    """Serves run directories; ``token`` as for another host."""
    clients: list[Client] = []
    watched: list[WatchedRun] = []

    async def serve(*directories: Path, token: str = "") -> Client:
        runs = watched_runs(directories, MonotonicClock())
        server = ViewServer(runs, PageAnswers(runs, LearnerNumbers(tmp_path / "cache")), token)
        client: Client = TestClient(TestServer(server.application()))
        await client.start_server()
        clients.append(client)
        watched.extend(runs.values())
        return client

    yield serve
    for client in clients:
        await client.close()
    for each in watched:
        each.close()

"""How a rollout starts: a stop while its engine is still starting, and what it says of itself meanwhile."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from services.rollout.__main__ import run_rollout
from services.runtime.arguments import ProcessArguments
from services.runtime.settings import Model, Rollout, Settings
from services.runtime.telemetry import LOOP_STALL_S
from tests.support.chat_models import TINY_TEMPLATE, chat_tokenizer, save_chat_model
from tests.support.clocks import VirtualClock


@asynccontextmanager
async def a_silent_engine() -> AsyncIterator[tuple[str, asyncio.Event]]:
    """A server that answers nothing: its URL, and an event that is set when it was asked."""
    asked = asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked


def arguments(directory: Path, server_url: str, metrics_port: int = 0) -> ProcessArguments:
    model = save_chat_model(directory / "model", chat_tokenizer(TINY_TEMPLATE, "<|end|>"))
    settings = Settings(model=Model(path=model), rollout=Rollout(server_url=server_url, metrics_port=metrics_port))
    return ProcessArguments(settings=settings, name="rollout-0", forwarded=())


async def test_a_stop_ends_a_rollout_whose_engine_is_not_there_yet(tmp_path: Path) -> None:
    async with a_silent_engine() as (url, asked):
        stop = asyncio.Event()
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            tasks.create_task(run_rollout(arguments(tmp_path, url), stop))
            await asked.wait()
            stop.set()


async def test_a_rollout_is_alive_however_long_its_engine_loads(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    clock, stop = VirtualClock(), asyncio.Event()
    async with a_silent_engine() as (url, asked), asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        tasks.create_task(run_rollout(arguments(tmp_path, url, port), stop, clock))
        await asked.wait()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            clock.advance(LOOP_STALL_S + 1)
            while (await client.get("/healthz")).status_code != httpx.codes.OK:
                pass
            assert (await client.get("/readyz")).status_code == httpx.codes.SERVICE_UNAVAILABLE
        stop.set()

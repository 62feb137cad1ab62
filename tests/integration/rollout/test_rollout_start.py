"""How a rollout starts: a stop while its engine is still starting, and its health meanwhile."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gspo_protocol.messages import Heartbeat, Pulse
from gspo_services.rollout.__main__ import run_rollout
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.runtime.telemetry import LOOP_STALL_S
from gspo_services.shared.settings.arguments import ProcessArguments
from gspo_services.shared.settings.sections import Broker, EnvironmentSection, Model, RewardSection, Rollout, Run, Settings
from tests.support.broker.scripted_broker import ScriptedBroker
from tests.support.clocks import VirtualClock
from tests.support.engines.chat_models import TINY_TEMPLATE, chat_tokenizer, save_chat_model
from tests.support.processes.ports import free_port
from tests.support.wire.zmq_ends import PATIENCE_S, in_background, zmq_context


@asynccontextmanager
async def a_silent_engine() -> AsyncIterator[tuple[str, asyncio.Event]]:
    """A server that never answers: its URL, and an event that is set by the first request."""
    asked = asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked


Ending = tuple[asyncio.Task[None], asyncio.Event]


def arguments(directory: Path, server_url: str, metrics_port: int = 0, linger: bool = False) -> ProcessArguments:
    model = save_chat_model(directory / "model", chat_tokenizer(TINY_TEMPLATE, "<|end|>"))
    rollout = Rollout(server_url=server_url, metrics_port=metrics_port, linger=linger)
    # An unused port: at the default one it would say hello to another run on this machine.
    broker = Broker(work_endpoint="tcp://127.0.0.1:9")
    settings = Settings(run=Run(directory=directory / "run"), model=Model(path=model), rollout=rollout, broker=broker)
    return ProcessArguments(settings=settings, name="rollout-0", forwarded=())


@asynccontextmanager
async def an_idle_engine() -> AsyncIterator[str]:
    """The URL of a server that answers only the first question of a client, about itself."""
    info = {"version": "0", "device": "cpu", "dtype": "float32", "tp_size": 1, "model_path": "/m"}
    content = json.dumps(info | {"incremental_streaming_output": True, "enable_deterministic_inference": True}).encode()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(content), content))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def run_to_its_end(
    tasks: asyncio.TaskGroup, broker: ScriptedBroker, directory: Path, url: str, **rollout: Any
) -> Ending:
    """A rollout whose broker's first pulse says that the run is over."""
    broker.pulse = Pulse(policy_version=1, weights_endpoint="", stopping=True)
    begun = arguments(directory, url, **rollout)
    settings = begun.settings.model_copy(update={"broker": Broker(work_endpoint=broker.endpoint)})
    stop = asyncio.Event()
    return tasks.create_task(run_rollout(replace(begun, settings=settings), stop)), stop


async def page(port: int, path: str) -> tuple[int, str]:
    async with aiohttp.request("GET", f"http://127.0.0.1:{port}{path}") as response:
        return response.status, await response.text()


async def test_at_the_end_of_the_run_a_rollout_ends_by_itself(tmp_path: Path) -> None:
    async with zmq_context() as context, an_idle_engine() as url, asyncio.timeout(PATIENCE_S):
        broker = ScriptedBroker(context)
        async with in_background(broker.serve()), asyncio.TaskGroup() as tasks:
            await run_to_its_end(tasks, broker, tmp_path, url)


async def test_a_rollout_that_lingers_is_alive_and_not_ready_until_it_is_stopped(tmp_path: Path) -> None:
    port = free_port()
    async with zmq_context() as context, an_idle_engine() as url, asyncio.timeout(PATIENCE_S):
        broker = ScriptedBroker(context)
        async with in_background(broker.serve()), asyncio.TaskGroup() as tasks:
            running, stop = await run_to_its_end(tasks, broker, tmp_path, url, metrics_port=port, linger=True)
            await broker.expect(Heartbeat)
            while (answer := await page(port, "/readyz"))[1] != "run complete\n":
                assert not running.done(), "it ended"
            assert answer[0] == HTTPStatus.SERVICE_UNAVAILABLE
            assert (await page(port, "/healthz"))[0] == HTTPStatus.OK
            assert (await page(port, "/startupz"))[0] == HTTPStatus.OK
            stop.set()
            await running


async def test_a_stop_ends_a_rollout_whose_engine_is_not_there_yet(tmp_path: Path) -> None:
    async with a_silent_engine() as (url, asked):
        stop = asyncio.Event()
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(run_rollout(arguments(tmp_path, url), stop))
            await asked.wait()
            stop.set()


async def test_a_rollout_is_alive_however_long_its_engine_loads(tmp_path: Path) -> None:
    port = free_port()
    clock, stop = VirtualClock(), asyncio.Event()
    async with a_silent_engine() as (url, asked), asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(run_rollout(arguments(tmp_path, url, port), stop, clock))
        await asked.wait()
        clock.advance(LOOP_STALL_S + 1)
        while (await page(port, "/healthz"))[0] != HTTPStatus.OK:
            pass
        assert (await page(port, "/readyz"))[0] == HTTPStatus.SERVICE_UNAVAILABLE
        assert (await page(port, "/startupz"))[0] == HTTPStatus.SERVICE_UNAVAILABLE
        stop.set()


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"environment": EnvironmentSection(name="dataset", options={"reward": "nowhere:f"})}, "there is no module nowhere"),
        ({"reward": RewardSection(variables=["GSPO_NO_SUCH_VARIABLE"])}, "names GSPO_NO_SUCH_VARIABLE, which"),
    ],
    ids=["function", "variable"],
)
async def test_a_reward_that_cannot_work_ends_the_start_before_the_engine_is_asked(
    tmp_path: Path, section: dict[str, Any], text: str
) -> None:
    async with a_silent_engine() as (url, asked):
        begun = arguments(tmp_path, url)
        settings = begun.settings.model_copy(update=section)
        with pytest.raises(ExceptionGroup) as group:
            await run_rollout(replace(begun, settings=settings), asyncio.Event())
        assert group.group_contains(ConfigurationError, match=text)
        assert not asked.is_set()

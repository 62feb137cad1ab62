"""A server that lives but does not listen ends the rollout; one that is merely slow does not."""

import asyncio

import pytest

from gspo_services.rollout.sglang.watch import REFUSALS, fail_when_deaf
from gspo_services.shared.runtime.errors import ServiceError

KNOCK_S = 0.01


class Door:
    """A listener that counts connections, and can be closed and opened again on its port."""

    def __init__(self) -> None:
        self.knocks = 0
        self.knocked = asyncio.Event()
        self.port = 0
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._count, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    async def _count(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.knocks += 1
        self.knocked.set()
        writer.close()
        await writer.wait_closed()


async def test_a_server_that_no_longer_listens_ends_the_watch_with_its_address() -> None:
    door = Door()
    await door.open()
    with pytest.RaisesGroup(pytest.RaisesExc(ServiceError, match=f"nothing listens at {door.url} any more")):
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(fail_when_deaf(door.url, knock_s=KNOCK_S))
            await door.knocked.wait()
            assert not watch.done()
            await door.close()


async def test_fewer_refusals_in_a_row_than_allowed_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    door = Door()
    await door.open()
    refused = 0
    connect = asyncio.open_connection

    async def closed_at_times(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        nonlocal refused
        if refused < REFUSALS - 1:
            refused += 1
            raise ConnectionRefusedError
        refused = 0
        return await connect(host, port)

    monkeypatch.setattr(asyncio, "open_connection", closed_at_times)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        watch = tasks.create_task(fail_when_deaf(door.url, knock_s=KNOCK_S))
        while door.knocks < 3:
            door.knocked.clear()
            await door.knocked.wait()
        assert not watch.done()
        watch.cancel()
    await door.close()

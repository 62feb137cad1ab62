"""Who gets a box at a server, what is refused with which status, and how it stops."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import aiohttp
import pytest

from gspo_services.tasks.sandbox import ProgramRefused, SandboxError, SandboxLimits, SandboxUnavailable
from gspo_services.tasks.sandbox.remote import RemoteOptions, RemoteSandbox
from gspo_services.tasks.sandbox.server import server as server_module
from gspo_services.tasks.sandbox.wire import BOX_PATH, INFO_PATH, RunCommand, answer_of, packed
from tests.support.sandboxes import BOUNDS, ScriptedSandbox, serving

LIMITS = SandboxLimits(wall_s=5, cpu_s=5)


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


async def status_of(session: aiohttp.ClientSession, url: str, key: str = "") -> tuple[int, str]:
    """The status of a request for a box, and its Retry-After."""
    try:
        socket = await session.ws_connect(url + BOX_PATH, headers={"Authorization": f"Bearer {key}"})
    except aiohttp.WSServerHandshakeError as error:
        assert error.headers is not None
        return error.status, error.headers.get("Retry-After", "")
    await socket.close()
    return 101, ""


@pytest.mark.parametrize(("key", "status"), [("the key of this one", 101), ("another", 401), ("", 401), ("clé", 401)])
async def test_only_the_key_opens_a_box(session: aiohttp.ClientSession, key: str, status: int) -> None:
    sandbox = ScriptedSandbox()
    async with serving(sandbox, key="the key of this one") as (_, url, _):
        assert await status_of(session, url, key) == (status, "")
        assert sandbox.num_boxes == (status == 101)
        async with session.get(url + INFO_PATH) as answer:
            assert answer.status == 401


async def test_what_is_no_request_for_a_box_is_told_so(session: aiohttp.ClientSession) -> None:
    async with serving(ScriptedSandbox()) as (_, url, metrics):
        for path, method, status in (("/v2/box", "GET", 404), (BOX_PATH, "POST", 405), (BOX_PATH, "GET", 426)):
            async with session.request(method, url + path) as answer:
                assert answer.status == status
        async with session.get(url + INFO_PATH) as answer:
            assert (await answer.json())["places"] == 2
        async with session.get(url + BOX_PATH, headers={"Upgrade": "websocket"}) as answer:
            assert answer.status == 400
        assert metrics.turned_away.labels(reason="path")._value.get() == 2
        assert metrics.turned_away.labels(reason="request")._value.get() == 2


async def test_a_full_server_says_when_to_come_again(
    session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = ScriptedSandbox(places=1)
    async with serving(sandbox, places=1, max_waiting=0) as (_, url, metrics):
        async with session.ws_connect(url + BOX_PATH):
            assert await status_of(session, url) == (429, "1")
    monkeypatch.setattr(server_module, "MOST_WAIT_S", 0.05)
    async with serving(sandbox, places=1, max_waiting=5) as (_, url, metrics):
        async with session.ws_connect(url + BOX_PATH):
            assert await status_of(session, url) == (429, "1")
        assert metrics.turned_away.labels(reason="busy")._value.get() == 1
        assert metrics.waiting._value.get() == 0


async def test_whoever_waits_gets_the_place_that_becomes_free(session: aiohttp.ClientSession) -> None:
    sandbox = ScriptedSandbox(places=1)
    async with serving(sandbox, places=1) as (_, url, _):
        first = await session.ws_connect(url + BOX_PATH)
        async with asyncio.TaskGroup() as tasks:
            second = tasks.create_task(status_of(session, url))
            await sandbox.full.wait()
            await first.close()
        assert second.result() == (101, "")


async def test_a_client_that_hangs_up_ends_its_program_and_frees_its_place(session: aiohttp.ClientSession) -> None:
    sandbox = ScriptedSandbox(places=1)
    async with serving(sandbox, places=1) as (_, url, _):
        socket = await session.ws_connect(url + BOX_PATH)
        await socket.send_bytes(packed(RunCommand(["hang"], False, LIMITS), b""))
        await sandbox.running.wait()
        await socket.close()
        await sandbox.cancelled.wait()
        assert await status_of(session, url) == (101, "")


async def test_a_box_that_nobody_asks_for_anything_ends(session: aiohttp.ClientSession) -> None:
    sandbox = ScriptedSandbox(places=1)
    async with serving(sandbox, places=1, bounds=replace(BOUNDS, idle_s=0.05)) as (_, url, _):
        socket = await session.ws_connect(url + BOX_PATH)
        ended = await socket.receive()
        assert (ended.type, ended.extra) == (aiohttp.WSMsgType.CLOSE, "nothing was asked for 0.05 s")
        await socket.close()
        assert await status_of(session, url) == (101, "")


@pytest.mark.parametrize("data", [b"", b"\0\0\0\xff{}", b"\0\0\0\2{}", b'\0\0\0\x0c{"sizes":[]}', b"\xff" * 9])
async def test_a_request_that_is_none_is_refused_and_the_box_goes_on(session: aiohttp.ClientSession, data: bytes) -> None:
    async with serving(ScriptedSandbox()) as (_, url, _):
        async with session.ws_connect(url + BOX_PATH) as socket:
            await socket.send_bytes(data)
            refused = answer_of((await socket.receive()).data)
            assert type(refused).__name__ == "BoxRefused"
            await socket.send_bytes(packed(RunCommand(["echo"], False, LIMITS), b"x"))
            assert type(answer_of((await socket.receive()).data)).__name__ == "RunOutcome"


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({"wall_s": 21}, "wall_s is 21: this server gives 20; raise sandbox.max_wall_s"),
        ({"cpu_s": 30}, "sandbox.max_wall_s"),
        ({"memory_bytes": 2 << 30}, "sandbox.max_memory_bytes"),
        ({"scratch_bytes": 2 << 30}, "sandbox.max_memory_bytes"),
        ({"processes": 5000}, "this server gives 1024"),
        ({"output_bytes": 1 << 40}, "output_bytes"),
    ],
)
async def test_more_than_a_server_gives_is_refused_with_the_setting(limits: dict[str, float], says: str) -> None:
    sandbox = ScriptedSandbox()
    async with (
        serving(sandbox) as (_, url, _),
        RemoteSandbox(RemoteOptions(urls=[url])).opened() as remote,
        remote.box() as box,
    ):
        with pytest.raises(ProgramRefused, match=says):
            await box.run(["echo"], replace(LIMITS, **limits))  # type: ignore[arg-type]
        assert sandbox.num_runs == 0


async def test_a_stop_lets_boxes_end_and_gives_no_more(session: aiohttp.ClientSession) -> None:
    sandbox = ScriptedSandbox(places=1)
    async with serving(sandbox, places=1) as (server, url, _):
        socket = await session.ws_connect(url + BOX_PATH)
        await socket.send_bytes(packed(RunCommand(["hang"], False, LIMITS), b""))
        await sandbox.running.wait()
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(status_of(session, url))
            await sandbox.full.wait()
            stopping = tasks.create_task(server.stop(20))
            assert await waiting == (503, "5")
            assert await status_of(session, url) == (503, "5")
            sandbox.goes_on.set()
            assert type(answer_of((await socket.receive()).data)).__name__ == "RunOutcome"
            assert not stopping.done()
            await socket.close()
        assert sandbox.num_open == 0


async def test_a_stop_cuts_off_what_takes_too_long(session: aiohttp.ClientSession) -> None:
    sandbox = ScriptedSandbox()
    async with serving(sandbox) as (server, url, _):
        socket = await session.ws_connect(url + BOX_PATH)
        await socket.send_bytes(packed(RunCommand(["hang"], False, LIMITS), b""))
        await sandbox.running.wait()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.stop(0.05))
            assert (await socket.receive()).extra == "the server stops"
        await sandbox.cancelled.wait()
    assert sandbox.num_open == 0


async def test_a_wrong_key_or_another_service_is_refused_at_the_start(session: aiohttp.ClientSession) -> None:
    async with serving(ScriptedSandbox(), key="a key of sixteen") as (_, url, _):
        with pytest.raises(SandboxUnavailable, match="set GSPO_SANDBOX_KEY here"):
            async with RemoteSandbox(RemoteOptions(urls=[url], key="wrong")).opened():
                raise AssertionError("it is open")
        with pytest.raises(SandboxUnavailable, match=r"correct sandbox\.urls"):
            async with RemoteSandbox(RemoteOptions(urls=[url + "/elsewhere"], key="a key of sixteen")).opened():
                raise AssertionError("it is open")


async def test_no_server_within_the_patience_is_an_error_of_the_sandbox(unused_tcp_port: int) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port}"
    async with RemoteSandbox(RemoteOptions(urls=[url], patience_s=0.05)).opened() as remote:
        with pytest.raises(SandboxError, match=r"no sandbox within 0\.05 s: .*cannot be reached"):
            async with remote.box():
                raise AssertionError("there is a box")

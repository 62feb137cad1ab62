"""Who gets a sandbox at a server, what is refused with which status, and how it stops."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import aiohttp
import pytest

from gspo_services.tasks.sandbox import ProgramRefused, SandboxError, SandboxLimits, SandboxUnavailable
from gspo_services.tasks.sandbox.remote import RemoteOptions, RemoteSandboxes
from gspo_services.tasks.sandbox.server import server as server_module
from gspo_services.tasks.sandbox.wire import INFO_PATH, SANDBOX_PATH, RunCommand, answer_of, packed
from tests.support.sandboxes import BOUNDS, ScriptedSandboxes, serving

LIMITS = SandboxLimits(wall_s=5, cpu_s=5)


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


async def status_of(session: aiohttp.ClientSession, url: str, key: str = "") -> tuple[int, str]:
    """The status of a request for a sandbox, and its Retry-After."""
    try:
        socket = await session.ws_connect(url + SANDBOX_PATH, headers={"Authorization": f"Bearer {key}"})
    except aiohttp.WSServerHandshakeError as error:
        assert error.headers is not None
        return error.status, error.headers.get("Retry-After", "")
    await socket.close()
    return 101, ""


@pytest.mark.parametrize(("key", "status"), [("the key of this one", 101), ("another", 401), ("", 401), ("clé", 401)])
async def test_only_the_key_opens_a_sandbox(session: aiohttp.ClientSession, key: str, status: int) -> None:
    sandboxes = ScriptedSandboxes()
    async with serving(sandboxes, key="the key of this one") as (_, url, _):
        assert await status_of(session, url, key) == (status, "")
        assert sandboxes.num_sandboxes == (status == 101)
        async with session.get(url + INFO_PATH) as answer:
            assert answer.status == 401


async def test_what_is_no_request_for_a_sandbox_is_told_so(session: aiohttp.ClientSession) -> None:
    async with serving(ScriptedSandboxes()) as (_, url, metrics):
        for path, method, status in (("/v2/sandbox", "GET", 404), (SANDBOX_PATH, "POST", 405), (SANDBOX_PATH, "GET", 426)):
            async with session.request(method, url + path) as answer:
                assert answer.status == status
        async with session.get(url + INFO_PATH) as answer:
            assert (await answer.json())["max_sandboxes"] == 2
        async with session.get(url + SANDBOX_PATH, headers={"Upgrade": "websocket"}) as answer:
            assert answer.status == 400
        assert metrics.turned_away.labels(reason="path")._value.get() == 2
        assert metrics.turned_away.labels(reason="request")._value.get() == 2


async def test_a_full_server_says_when_to_come_again(
    session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandboxes = ScriptedSandboxes(max_sandboxes=1)
    async with serving(sandboxes, max_sandboxes=1, max_waiting=0) as (_, url, metrics):
        async with session.ws_connect(url + SANDBOX_PATH):
            assert await status_of(session, url) == (429, "1")
    monkeypatch.setattr(server_module, "MOST_WAIT_S", 0.05)
    async with serving(sandboxes, max_sandboxes=1, max_waiting=5) as (_, url, metrics):
        async with session.ws_connect(url + SANDBOX_PATH):
            assert await status_of(session, url) == (429, "1")
        assert metrics.turned_away.labels(reason="busy")._value.get() == 1
        assert metrics.waiting._value.get() == 0


async def test_whoever_waits_gets_the_place_that_becomes_free(session: aiohttp.ClientSession) -> None:
    sandboxes = ScriptedSandboxes(max_sandboxes=1)
    async with serving(sandboxes, max_sandboxes=1) as (_, url, _):
        first = await session.ws_connect(url + SANDBOX_PATH)
        async with asyncio.TaskGroup() as tasks:
            second = tasks.create_task(status_of(session, url))
            await sandboxes.full.wait()
            await first.close()
        assert second.result() == (101, "")


async def test_a_client_that_hangs_up_ends_its_program_and_frees_its_place(session: aiohttp.ClientSession) -> None:
    sandboxes = ScriptedSandboxes(max_sandboxes=1)
    async with serving(sandboxes, max_sandboxes=1) as (_, url, _):
        socket = await session.ws_connect(url + SANDBOX_PATH)
        await socket.send_bytes(packed(RunCommand(["hang"], False, LIMITS), b""))
        await sandboxes.running.wait()
        await socket.close()
        await sandboxes.cancelled.wait()
        assert await status_of(session, url) == (101, "")


async def test_a_sandbox_that_nobody_asks_for_anything_ends(session: aiohttp.ClientSession) -> None:
    sandboxes = ScriptedSandboxes(max_sandboxes=1)
    async with serving(sandboxes, max_sandboxes=1, bounds=replace(BOUNDS, idle_s=0.05)) as (_, url, _):
        socket = await session.ws_connect(url + SANDBOX_PATH)
        ended = await socket.receive()
        assert (ended.type, ended.extra) == (aiohttp.WSMsgType.CLOSE, "nothing was asked for 0.05 s")
        await socket.close()
        assert await status_of(session, url) == (101, "")


@pytest.mark.parametrize("data", [b"", b"\0\0\0\xff{}", b"\0\0\0\2{}", b'\0\0\0\x0c{"sizes":[]}', b"\xff" * 9])
async def test_a_request_that_is_none_is_refused_and_the_sandbox_goes_on(
    session: aiohttp.ClientSession, data: bytes
) -> None:
    async with serving(ScriptedSandboxes()) as (_, url, _):
        async with session.ws_connect(url + SANDBOX_PATH) as socket:
            await socket.send_bytes(data)
            refused = answer_of((await socket.receive()).data)
            assert type(refused).__name__ == "SandboxRefused"
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
    sandboxes = ScriptedSandboxes()
    async with (
        serving(sandboxes) as (_, url, _),
        RemoteSandboxes(RemoteOptions(urls=[url])).opened() as remote,
        remote.acquire() as sandbox,
    ):
        with pytest.raises(ProgramRefused, match=says):
            await sandbox.run(["echo"], replace(LIMITS, **limits))  # type: ignore[arg-type]
        assert sandboxes.num_runs == 0


async def test_a_stop_lets_sandboxes_end_and_gives_no_more(session: aiohttp.ClientSession) -> None:
    sandboxes = ScriptedSandboxes(max_sandboxes=1)
    async with serving(sandboxes, max_sandboxes=1) as (server, url, _):
        socket = await session.ws_connect(url + SANDBOX_PATH)
        await socket.send_bytes(packed(RunCommand(["hang"], False, LIMITS), b""))
        await sandboxes.running.wait()
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(status_of(session, url))
            await sandboxes.full.wait()
            stopping = tasks.create_task(server.stop(20))
            assert await waiting == (503, "5")
            assert await status_of(session, url) == (503, "5")
            sandboxes.goes_on.set()
            assert type(answer_of((await socket.receive()).data)).__name__ == "RunOutcome"
            assert not stopping.done()
            await socket.close()
        assert sandboxes.num_open == 0


async def test_a_stop_cuts_off_what_takes_too_long(session: aiohttp.ClientSession) -> None:
    sandboxes = ScriptedSandboxes()
    async with serving(sandboxes) as (server, url, _):
        socket = await session.ws_connect(url + SANDBOX_PATH)
        await socket.send_bytes(packed(RunCommand(["hang"], False, LIMITS), b""))
        await sandboxes.running.wait()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.stop(0.05))
            assert (await socket.receive()).extra == "the server stops"
        await sandboxes.cancelled.wait()
    assert sandboxes.num_open == 0


async def test_a_wrong_key_or_another_service_is_refused_at_the_start(session: aiohttp.ClientSession) -> None:
    async with serving(ScriptedSandboxes(), key="a key of sixteen") as (_, url, _):
        with pytest.raises(SandboxUnavailable, match="set GSPO_SANDBOX_KEY here"):
            async with RemoteSandboxes(RemoteOptions(urls=[url], key="wrong")).opened():
                raise AssertionError("it is open")
        with pytest.raises(SandboxUnavailable, match=r"correct sandbox\.urls"):
            async with RemoteSandboxes(RemoteOptions(urls=[url + "/elsewhere"], key="a key of sixteen")).opened():
                raise AssertionError("it is open")


async def test_no_server_within_the_timeout_is_an_error_of_the_sandbox(unused_tcp_port: int) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port}"
    async with RemoteSandboxes(RemoteOptions(urls=[url], acquire_timeout_s=0.05)).opened() as remote:
        with pytest.raises(SandboxError, match=r"no sandbox within 0\.05 s: .*cannot be reached"):
            async with remote.acquire():
                raise AssertionError("there is a sandbox")

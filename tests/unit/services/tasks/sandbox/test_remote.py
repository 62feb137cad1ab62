"""A server's death costs time: the sandbox is made again elsewhere, and only the program itself can fail."""

import asyncio

import pytest

from gspo_services.tasks.sandbox import SandboxError, SandboxLimits
from gspo_services.tasks.sandbox import remote as remote_module
from gspo_services.tasks.sandbox.remote import RemoteOptions, RemoteSandboxes
from gspo_services.tasks.sandbox.wire import WireError, answer_of, request_of
from tests.support.sandboxes import ScriptedSandboxes, serving

LIMITS = SandboxLimits(wall_s=5, cpu_s=5)


async def test_a_sandbox_answers_over_http_as_it_does_here() -> None:
    async with serving(ScriptedSandboxes()) as (_, url, _), RemoteSandboxes(RemoteOptions(urls=[url])).opened() as remote:
        async with remote.acquire() as sandbox:
            await sandbox.put({"a": b"1", "b/c": b"\0\xff"})
            assert (await sandbox.prepare(["make", "it"], LIMITS)).succeeded
            outcome = await sandbox.run(["echo"], LIMITS, b"in")
            assert outcome.stdout == b"['a', 'b/c'] ['make it'] b'in'"
            assert (outcome.exit_code, outcome.wall_s) == (0, 0.1)


async def test_after_a_servers_end_the_sandbox_is_made_again_on_another() -> None:
    first, second = ScriptedSandboxes(), ScriptedSandboxes()
    async with serving(second) as (_, other, _), serving(first) as (server, url, _):
        async with RemoteSandboxes(RemoteOptions(urls=[url, other])).opened() as remote, remote.acquire() as sandbox:
            await sandbox.put({"a": b"1"})
            await sandbox.prepare(["make", "it"], LIMITS)
            await sandbox.prepare(["test", "it"], LIMITS)
            async with asyncio.TaskGroup() as tasks:
                run = tasks.create_task(sandbox.run(["hang"], LIMITS, b"in"))
                await first.running.wait()
                second.goes_on.set()
                await server.stop(0)
            assert run.result().stdout == b"['a'] ['make it', 'test it'] b'in'"
            # One to see that it is there, one for the sandbox.
            assert (first.num_sandboxes, second.num_sandboxes, second.num_runs) == (2, 2, 1)


async def test_a_client_waits_for_a_server_that_is_started_again(
    unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_module, "RETRY_S", 0.01)
    url = f"http://127.0.0.1:{unused_tcp_port}"
    async with (
        RemoteSandboxes(RemoteOptions(urls=[url], acquire_timeout_s=60)).opened() as remote,
        asyncio.TaskGroup() as tasks,
    ):

        async def runs() -> bytes:
            async with remote.acquire() as sandbox:
                return (await sandbox.run(["echo"], LIMITS)).stdout

        run = tasks.create_task(runs())
        await asyncio.sleep(0)
        async with serving(ScriptedSandboxes(), port=unused_tcp_port):
            assert await run == b"[] [] b''"


async def test_a_request_that_ends_every_sandbox_is_given_up_and_is_no_outcome() -> None:
    sandboxes = ScriptedSandboxes()
    async with serving(sandboxes) as (_, url, metrics), RemoteSandboxes(RemoteOptions(urls=[url])).opened() as remote:
        async with remote.acquire() as sandbox:
            with pytest.raises(SandboxError, match=r"3 sandboxes have ended amid the same request.*init has ended"):
                await sandbox.run(["fail"], LIMITS)
            assert sandboxes.num_runs == 3
            assert metrics.runs.labels(ending="failed")._value.get() == 3
            assert (await sandbox.run(["echo"], LIMITS)).succeeded


async def test_a_server_that_prepares_otherwise_is_not_believed() -> None:
    first, second = ScriptedSandboxes(), ScriptedSandboxes(prepares=False)
    async with serving(second) as (_, other, _), serving(first) as (server, url, _):
        async with RemoteSandboxes(RemoteOptions(urls=[url, other])).opened() as remote, remote.acquire() as sandbox:
            assert (await sandbox.prepare(["make", "it"], LIMITS)).succeeded
            await server.stop(0)
            with pytest.raises(SandboxError, match="make ends otherwise on another server"):
                await sandbox.run(["echo"], LIMITS)
            assert second.num_runs == 0


@pytest.mark.parametrize(
    "header",
    [
        b'{"is": "outcome", "sizes": []}',
        b'{"is": "outcome", "exit_code": "0", "signal": null, "limit": null, "wall_s": 1, "cpu_s": 1, "sizes": [0, 0]}',
        b'{"is": "outcome", "exit_code": 0, "signal": null, "limit": "x", "wall_s": 1, "cpu_s": 1, "sizes": [0, 0]}',
        b'{"is": "done", "sizes": [1]}', b'{"is": "done", "sizes": [-1]}', b'{"is": "done", "sizes": [true]}',
        b'{"is": "done"}', b'{"is": "won", "sizes": []}', b"[]", b"[" * 60000,
    ],
)  # fmt: skip
def test_an_answer_that_is_none_is_not_believed(header: bytes) -> None:
    with pytest.raises(WireError):
        answer_of(len(header).to_bytes(4, "big") + header)


def test_a_request_brings_what_it_says() -> None:
    header = b'{"do": "put", "names": ["a", "b"], "sizes": [1]}'
    with pytest.raises(WireError, match="1 parts"):
        request_of(len(header).to_bytes(4, "big") + header + b"x")

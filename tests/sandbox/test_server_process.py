"""A real ``gspo sandbox``: killed amid a run, started again, stopped."""

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from gspo_services.tasks.sandbox.remote import RemoteOptions, RemoteSandboxes
from gspo_services.tasks.sandbox.wire import KEY_VARIABLE
from tests.sandbox.conftest import LIMITS, below

pytestmark = pytest.mark.sandbox

KEY = "the-key-of-this-test"
START_S = 120
NUM_PROCESSES = 6
"""Two of bubblewrap, init, its spawner, the run's first process and its program."""
Starts = Callable[[int], "subprocess.Popen[bytes]"]


@pytest.fixture
def starts() -> Iterator[Starts]:
    """A function that starts a server on a port."""
    servers: list[subprocess.Popen[bytes]] = []

    def start(port: int) -> "subprocess.Popen[bytes]":
        settings = (f"sandbox.port={port}", "sandbox.metrics_port=0", "sandbox.max_sandboxes=1", "sandbox.warm=0")
        words = [word for setting in settings for word in ("--set", setting)]
        command = [sys.executable, "-m", "gspo_services.tasks.sandbox.server", *words]
        servers.append(subprocess.Popen(command, env={**os.environ, KEY_VARIABLE: KEY}))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()
        server.wait()


async def test_a_server_that_is_killed_amid_a_run_leaves_nothing_and_costs_time_alone(
    starts: Starts, unused_tcp_port: int
) -> None:
    first = starts(unused_tcp_port)
    options = RemoteOptions(urls=[f"http://127.0.0.1:{unused_tcp_port}"], key=KEY, acquire_timeout_s=START_S)
    async with RemoteSandboxes(options).opened() as sandboxes, sandboxes.acquire() as sandbox, asyncio.TaskGroup() as tasks:
        await sandbox.put({"script.py": b"import time\ntime.sleep(2)\nprint(open('/sandbox/made').read(), input())"})
        await sandbox.put({"make.py": b"open('/sandbox/made', 'w').write('it is made')"})
        assert (await sandbox.prepare(["python", "make.py"], LIMITS)).succeeded
        run = tasks.create_task(sandbox.run(["python", "script.py"], replace(LIMITS, wall_s=60), b"and run"))
        until = time.monotonic() + START_S
        while len(found := below(first.pid)) < NUM_PROCESSES:
            assert time.monotonic() < until, found
            await asyncio.sleep(0)
        ends = [os.pidfd_open(pid) for pid in found]
        first.kill()
        for end in ends:
            assert select.select([end], [], [], 20)[0], "a process goes on"
            os.close(end)
        second = starts(unused_tcp_port)
        outcome = await run
    assert (outcome.exit_code, outcome.stdout) == (0, b"it is made and run\n")
    second.send_signal(signal.SIGTERM)
    assert second.wait(timeout=30) == 0

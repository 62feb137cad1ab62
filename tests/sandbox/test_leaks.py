"""After many runs, and after a kill of whoever started them, nothing is left: no process, no mount, no file."""

import asyncio
import os
import select
import signal
import subprocess
import sys
import time

import pytest

from gspo_services.tasks.sandbox import LocalOptions, LocalSandboxes, SandboxError
from tests.sandbox.conftest import LIMITS, below, served

pytestmark = pytest.mark.sandbox

FORKS = b"""
import os, time
if os.fork() == 0:
    time.sleep(1000)
open("/tmp/a", "w").write("a")
print(input())
"""
NUM_RUNS = int(os.environ.get("GSPO_TEST_RUNS", "300"))
PARENT = """
import asyncio, sys
from dataclasses import replace
from gspo_services.tasks.sandbox import LocalOptions, LocalSandboxes
from tests.sandbox.conftest import LIMITS
LIMITS = replace(LIMITS, wall_s=100, cpu_s=100)
async def main():
    async with LocalSandboxes(LocalOptions(max_sandboxes=1, warm=1)).opened() as sandboxes, sandboxes.acquire() as sandbox:
        await sandbox.put({"script.py": b"import os\\nprint(input(), flush=True)\\nos.fork()\\nwhile True: pass"})
        run = asyncio.ensure_future(sandbox.run(["python", "script.py"], LIMITS, b"began"))
        print("running", flush=True)
        await run
asyncio.run(main())
"""


@pytest.mark.parametrize("over", ["local", "http"])
async def test_many_runs_leave_nothing(nothing_is_left: None, over: str) -> None:
    options = LocalOptions(max_sandboxes=2, warm=1)
    opened = served(options, acquire_timeout_s=3600) if over == "http" else LocalSandboxes(options).opened()
    async with opened as sandboxes:

        async def part(number: int) -> None:
            async with sandboxes.acquire() as sandbox:
                await sandbox.put({"script.py": FORKS})
                open_before = len(os.listdir("/proc/self/fd"))
                for index in range(NUM_RUNS // 6):
                    said = f"{number} {index}".encode()
                    outcome = await sandbox.run(["python", "script.py"], LIMITS, said)
                    assert said in outcome.stdout
                assert len(os.listdir("/proc/self/fd")) <= open_before + 16

        async with asyncio.TaskGroup() as tasks:
            for number in range(6):
                tasks.create_task(part(number))


def test_a_kill_of_the_parent_ends_every_program(nothing_is_left: None) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        assert b"running\n" in parent.stdout
        # Four of each sandbox, and three of the run.
        until = time.monotonic() + 60
        while len(found := below(parent.pid)) != 11:
            assert time.monotonic() < until, found
        ends = [os.pidfd_open(pid) for pid in found]
        parent.send_signal(signal.SIGKILL)
        for end in ends:
            assert select.select([end], [], [], 10)[0], "a process goes on"
            os.close(end)
    finally:
        parent.kill()
        parent.wait()
        assert parent.stdout is not None
        parent.stdout.close()


async def test_a_sandbox_that_dies_amid_a_run_is_an_error_and_the_next_sandbox_works(nothing_is_left: None) -> None:
    async with LocalSandboxes(LocalOptions(max_sandboxes=1, warm=0)).opened() as sandboxes:
        async with sandboxes.acquire() as sandbox:
            (first, *_) = below(os.getpid())
            await sandbox.put({"script.py": b"print(input(), flush=True)\nwhile True: pass"})
            async with asyncio.TaskGroup() as tasks:

                async def dies() -> None:
                    with pytest.raises(SandboxError, match="has ended"):
                        await sandbox.run(["python", "script.py"], LIMITS, b"x")

                tasks.create_task(dies())
                await asyncio.sleep(0)
                os.kill(first, signal.SIGKILL)
        async with sandboxes.acquire() as sandbox:
            await sandbox.put({"script.py": b"print('again')"})
            assert (await sandbox.run(["python", "script.py"], LIMITS)).stdout == b"again\n"


async def test_a_spawner_that_the_kernel_has_ended_is_replaced(nothing_is_left: None) -> None:
    async with LocalSandboxes(LocalOptions(max_sandboxes=1, warm=0)).opened() as sandboxes, sandboxes.acquire() as sandbox:
        await sandbox.put({"script.py": b"print('again')"})
        for _ in range(2):
            *_, spawner = below(os.getpid())
            end = os.pidfd_open(spawner)
            os.kill(spawner, signal.SIGKILL)
            assert select.select([end], [], [], 10)[0]
            os.close(end)
            assert (await sandbox.run(["python", "script.py"], LIMITS)).stdout == b"again\n"
        assert len(below(os.getpid())) == 4

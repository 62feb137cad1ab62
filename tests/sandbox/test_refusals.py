"""Where a wall is missing, nothing runs: the start says which one, and the way out."""

import asyncio
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gspo_services.shared.runtime.errors import EXIT_FAILED, UnprovenError, exit_status
from gspo_services.shared.settings import SandboxSection
from gspo_services.tasks.sandbox import LocalOptions, LocalSandboxes, SandboxUnavailable, open_configured
from gspo_services.tasks.sandbox import walls as walls_module

pytestmark = pytest.mark.sandbox

OPENS = """
import asyncio, ctypes, errno, os, resource, sys
from gspo_services.tasks.sandbox import LocalOptions, LocalSandboxes, SandboxUnavailable
from gspo_services.tasks.sandbox.init.filter import *
from gspo_services.tasks.sandbox.init.namespaces import LIBC
def refuse(number, argument=None, error=errno.EINVAL):
    other = [step(LOAD, FIRST_ARGUMENT), step(IF_EQUAL, argument, 0, 1)] if argument is not None else []
    steps = [step(LOAD, NUMBER), step(IF_EQUAL, number, 0, len(other) + 1), *other, answered(error), step(RETURN, ALLOW)]
    LIBC.prctl(38, 1, 0, 0, 0)
    forbid(b"".join(steps))
PRCTL = {"x86_64": 157, "aarch64": 167}[os.uname().machine]
exec(sys.argv[1])
async def main():
    try:
        async with LocalSandboxes(LocalOptions(max_sandboxes=1, warm=0)).opened():
            print("it is open")
    except SandboxUnavailable as error:
        print(error)
asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("without", "says"),
    [
        ("refuse(PRCTL, 22)", "this kernel takes no seccomp filters"),
        ("refuse(435, error=errno.ENOSYS)", "clone3: Function not implemented"),
        (
            "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))",
            "a run needs 256 as its RLIMIT_NOFILE, and this machine gives 100",
        ),
        ("os.environ['PATH'] = '/nowhere'", "bwrap is not found in PATH"),
    ],
)
def test_a_machine_that_gives_less_runs_nothing(without: str, says: str) -> None:
    path = os.pathsep.join([str(Path("names").absolute()), *(part for part in sys.path if part)])
    done = subprocess.run(
        [sys.executable, "-c", OPENS, without], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert says in done.stdout, done
    assert "Code of a model runs only in a sandbox. Install bubblewrap" in done.stdout
    assert "it is open" not in done.stdout


async def test_a_sandbox_that_is_killed_while_it_starts_may_start_the_next_time(
    nothing_is_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = asyncio.create_subprocess_exec

    async def killed(*command: str, **how: Any) -> asyncio.subprocess.Process:
        process = await plain(*command, **how)
        os.kill(first_child(process.pid), signal.SIGKILL)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", killed)
    with pytest.raises(UnprovenError, match=r"was killed while it started \(SIGKILL\)") as caught:
        async with open_configured(SandboxSection()):
            raise AssertionError("it is open")
    assert exit_status(partial(_raise, caught.value)) == EXIT_FAILED


def first_child(pid: int) -> int:
    """Once there is one: the start of a process sets no Event."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    while not (found := children.read_text().split()):
        os.sched_yield()
    return int(found[0])


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ("program.forbid = lambda steps: None", "seccomp filter, no namespaces of its own"),
        (
            "program.drop_rights = lambda: namespaces.LIBC.prctl(38, 1, 0, 0, 0); spawner.enter = lambda *_: None",
            "a hidden /proc",
        ),
    ],
)
async def test_init_refuses_to_serve_without_one_of_its_walls(
    monkeypatch: pytest.MonkeyPatch, broken: str, says: str
) -> None:
    start = walls_module.START.replace(
        "del sys.path[0];", f"del sys.path[0]; from gspo_sandbox_init import namespaces, program, spawner; {broken};"
    )
    monkeypatch.setattr(walls_module, "START", start)
    with pytest.raises(SandboxUnavailable, match=says):
        async with LocalSandboxes(LocalOptions(max_sandboxes=1, warm=0)).opened():
            raise AssertionError("it is open")

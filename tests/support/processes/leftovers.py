"""A pytest plugin: a process, a temporary file or shared memory that the tests leave behind is named and fails the session.

The tests have a temporary folder of their own (``tmp_path`` stays where pytest keeps it). It is in their processes'
environment, which tells these from all others. SGLang's files in /dev/shm do not name their owner: they are checked only
when no other server was on the machine.

With ``pytest -n`` each worker has a folder of its own inside the session's, looks for what its tests left, and tells the
session, which fails. The session itself looks once more when its workers have ended: one that was killed has told nothing.
"""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

PATIENCE_S = float(os.environ.get("GSPO_TEST_PATIENCE_S", "10"))
"""Time for processes that are about to end. The plugin's own tests leave some on purpose, and shorten it."""
SHARED = Path("/dev/shm")
HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Python's own processes, which end with pytest."""
EXEC_S = 1.0
KERNEL_THREADS = 2
"""The process that is the parent of all others without a program."""
before_key = pytest.StashKey["Before"]()
found_key = pytest.StashKey[list[str]]()
REPORT = "gspo_leftovers"
"""Under this name a worker sends its lines to the session."""


class Before:
    """What was there when the session began."""

    def __init__(self, worker: str | None) -> None:
        # The folders for tmp_path and for what is compiled once and shared stay where they are.
        self.variables = {
            "PYTEST_DEBUG_TEMPROOT": os.environ.get("PYTEST_DEBUG_TEMPROOT"),
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR"),
            "TMPDIR": os.environ.get("TMPDIR"),
        }
        everybodys = tempfile.gettempdir()
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", everybodys)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{everybodys}/torchinductor_{os.getuid()}")
        # Python makes a folder for its processes and removes it when this one ends. Make it now, so that it is not in ours.
        multiprocessing.util.get_temp_dir()
        self.directory = Path(tempfile.mkdtemp(prefix=f"{worker or 'gspo-tests'}-"))
        _use(str(self.directory))
        self.shared = set(_shared_files())
        self.is_alone = not _has_servers()

    def restore(self) -> None:
        for name, value in self.variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _use(self.variables["TMPDIR"])
        shutil.rmtree(self.directory)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[before_key] = Before(_worker(config))
    config.stash[found_key] = []


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker has ended. Its output is absent when it was killed."""
    report = getattr(node, "workeroutput", {}).get(REPORT, [])
    node.config.stash[found_key] += [f"{line} (worker {node.gateway.id})" for line in report]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    found = config.stash[found_key]
    found += leftovers(config.stash[before_key])
    if _worker(config) is not None:
        config.workeroutput[REPORT] = found  # type: ignore[attr-defined]
    elif found and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    found = config.stash[found_key]
    if found:
        terminalreporter.section("the tests left behind", red=True)
        for line in found:
            terminalreporter.line(line)


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[before_key].restore()


def _worker(config: pytest.Config) -> str | None:
    """The name of this worker of ``pytest -n``; None in the session itself."""
    return getattr(config, "workerinput", {}).get("workerid")


def leftovers(before: Before) -> list[str]:
    """A line for each leftover. Processes are ended, so that the next session does not find them."""
    processes = list(_processes(before.directory))
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    lines = []
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            lines.append(f"process {process.pid}: {' '.join(process.cmdline()) or process.name()}")
            process.kill()
    lines += [f"temporary {'folder' if path.is_dir() else 'file'} {path}" for path in sorted(before.directory.iterdir())]
    if before.is_alone and not _has_servers():
        lines += [f"shared memory {path}" for path in sorted(set(_shared_files()) - before.shared)]
    return lines


def _use(directory: str | None) -> None:
    if directory is not None:
        os.environ["TMPDIR"] = directory
    tempfile.tempdir = None


def _processes(directory: Path) -> Iterator[psutil.Process]:
    """This process's descendants, and orphans whose temporary folder is in ours."""
    mine = psutil.Process()
    descendants = set(mine.children(recursive=True))
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            ours = process in descendants or _environment(process).get("TMPDIR", "").startswith(str(directory))
            is_helper = any(name in argument for argument in process.cmdline() for name in HELPERS)
            if ours and process != mine and not is_helper and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def _environment(process: psutil.Process) -> dict[str, str]:
    """A process has neither environment nor arguments for a moment after its start: exec has told its parent already."""
    deadline = time.monotonic() + EXEC_S
    while not (environment := process.environ()) and not process.cmdline() and not _is_of_the_kernel(process):
        if time.monotonic() > deadline:
            break
        time.sleep(0.001)
    return environment


def _is_of_the_kernel(process: psutil.Process) -> bool:
    return KERNEL_THREADS in (process.pid, process.ppid())


def _shared_files() -> Iterator[Path]:
    return SHARED.glob("sglang_loads_*.shm")


def _has_servers() -> bool:
    """Whether any SGLang runs on this machine."""
    return any(process.info["name"].startswith("sglang::") for process in psutil.process_iter(["name"]))

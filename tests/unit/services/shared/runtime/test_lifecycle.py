"""Start and stop of a process: exit statuses, signals, waiting."""

import asyncio
import errno
import json
import os
import signal
import sqlite3
import subprocess
import sys

import pytest
import zmq

from gspo_services.shared.runtime.errors import (
    ConfigurationError,
    EndpointError,
    OccupiedError,
    PassingFault,
    ReplacedError,
    ServiceError,
    UnprovenError,
    flatten,
)
from gspo_services.shared.runtime.lifecycle import run_process, until_stopped


def ending_with(error: Exception | None) -> int:
    async def service(stop: asyncio.Event) -> None:
        if error is not None:
            raise error

    return run_process(service)


def caused_by(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, 0),
        (ServiceError("the engine keeps failing"), 1),
        (ConfigurationError("batch.max_lag is -1"), 2),
        (ExceptionGroup("inner", [ReplacedError("by a newer one")]), 3),
        (EndpointError("cannot bind tcp://127.0.0.1:1"), 2),
        (ExceptionGroup("inner", [ExceptionGroup("deeper", [ServiceError("x")])]), 1),
        (ExceptionGroup("inner", [ServiceError("x"), EndpointError("y")]), 1),
        (OSError(errno.ENOSPC, "No space left on device", "/run/x"), 5),
        (ExceptionGroup("inner", [ReplacedError("by a newer one"), ServiceError("x"), EndpointError("y")]), 3),
        (ExceptionGroup("inner", [OccupiedError("by a live one"), KeyError("bug")]), 4),
        (caused_by(ConfigurationError("run.directory cannot be used"), OSError(errno.EDQUOT, "Disk quota exceeded")), 5),
        (caused_by(ServiceError("x"), caused_by(ValueError("y"), sqlite3.OperationalError("database or disk is full"))), 5),
        (ServiceError("the end of its log: OSError: [Errno 28] No space left on device"), 5),
        (ExceptionGroup("inner", [ReplacedError("by a newer one"), OSError(errno.ENOSPC, "No space left on device")]), 3),
        (UnprovenError("programs cannot be scored"), 6),
        (caused_by(ConfigurationError("x"), OSError(errno.EIO, "Input/output error", "/data")), 1),
        (caused_by(UnprovenError("x"), caused_by(ValueError("y"), OSError(errno.ESTALE, "Stale file handle"))), 1),
        (caused_by(ConfigurationError("x"), sqlite3.OperationalError("disk I/O error")), 1),
        (caused_by(EndpointError("x"), zmq.ZMQError(errno.EADDRINUSE)), 1),
        (caused_by(EndpointError("x"), zmq.ZMQError(errno.ENODEV)), 2),
        (caused_by(ConfigurationError("x"), TimeoutError()), 1),
        (caused_by(ConfigurationError("x"), MemoryError()), 1),
        (caused_by(ConfigurationError("x"), PassingFault("SIGKILL")), 1),
        (ConfigurationError('cannot import "my": OSError: [Errno 24] Too many open files'), 1),
        (caused_by(ConfigurationError("x"), FileNotFoundError(errno.ENOENT, "No such file or directory", "/data")), 2),
        (caused_by(ConfigurationError("x"), PermissionError(errno.EACCES, "Permission denied", "/data")), 2),
    ],
)
def test_errors_meant_for_people_become_an_exit_status(error: Exception | None, status: int) -> None:
    assert ending_with(error) == status


def test_a_bug_ends_with_its_traceback() -> None:
    with pytest.raises(KeyError, match="bug"):
        ending_with(KeyError("bug"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_sets_stop_and_the_service_ends_by_itself(number: signal.Signals) -> None:
    ended = []

    async def service(stop: asyncio.Event) -> None:
        os.kill(os.getpid(), number)
        await stop.wait()
        ended.append("in order")

    assert run_process(service) == 0
    assert ended == ["in order"]


async def test_waiting_for_stop_says_whether_it_was_set() -> None:
    stop = asyncio.Event()
    assert await until_stopped(stop, 0.001) is False
    stop.set()
    assert await until_stopped(stop, 60.0) is True


def test_the_leaves_of_nested_groups_come_in_order() -> None:
    a, b, c = ValueError("a"), ValueError("b"), ValueError("c")
    assert flatten(ExceptionGroup("", [a, ExceptionGroup("", [ExceptionGroup("", [b]), c])])) == [a, b, c]


def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    code = "from gspo_services.shared.runtime.lifecycle import die_with_parent as die; die(parent_pid={}); print('alive')"
    mine = subprocess.run([sys.executable, "-c", code.format(os.getpid())], capture_output=True, timeout=60, check=False)
    assert (mine.returncode, mine.stdout) == (0, b"alive\n")
    orphan = subprocess.run([sys.executable, "-c", code.format(1)], capture_output=True, timeout=60, check=False)
    assert (orphan.returncode, orphan.stdout) == (-signal.SIGTERM, b"")


def logged(level: str, code: str) -> subprocess.CompletedProcess[str]:
    logs = "gspo_services.shared.runtime.logs"
    script = f"import structlog\nfrom {logs} import configure_logging\nconfigure_logging('broker')\n{code}"
    environment = {**os.environ, "GSPO_LOG_LEVEL": level}
    return subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_off_a_terminal_each_event_is_a_line_of_json_on_standard_error() -> None:
    code = "log = structlog.get_logger()\nlog.debug('quiet')\nlog.info('group_dropped', lag=2)\nlog.error('bad', error='x')"
    done = logged("info", code)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [(line["event"], line["level"], line["service"]) for line in lines] == [
        ("group_dropped", "info", "broker"),
        ("bad", "error", "broker"),
    ]
    assert lines[0]["lag"] == 2
    assert done.stdout == ""


def test_an_unknown_log_level_is_refused_with_the_known_ones() -> None:
    done = logged("loud", "")
    assert done.returncode != 0
    assert "GSPO_LOG_LEVEL is 'loud': use one of debug, info, warning, error" in done.stderr


def test_a_process_that_leaves_keeps_its_status_and_its_output() -> None:
    code = """
import atexit, os
from gspo_services.shared.runtime.lifecycle import leave
atexit.register(os.abort)  # as C++ does when a thread of its own calls into Python at the end
print("the result")
leave(3)
"""
    ended = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stdout) == (3, b"the result\n")

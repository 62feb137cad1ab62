"""Start and stop of a process: signals set one event; everything else lives in the service's TaskGroup."""

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, NoReturn

import structlog

from gspo_services.shared.runtime.errors import exit_status

log = structlog.get_logger()

PR_SET_PDEATHSIG: Final = 1
# Loaded before any fork: a child between fork and exec must not load a library.
_LIBC: Final = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def module_command(module: str, *arguments: str, python: str = "") -> list[str]:
    """Return the command line of a process that runs ``module``, in the interpreter ``python``; empty: in this one.

    ``-P`` keeps the working directory off the import path, where a user's random.py or gspo folder would hide the module of
    that name.
    """
    return [python or sys.executable, "-P", "-m", module, *arguments]


def run_process(service: Callable[[asyncio.Event], Awaitable[None]]) -> int:
    """Run a program that consists of ``service``. Returns the exit status (``errors.exit_status``)."""
    return exit_status(lambda: run_until_stopped(service))


def run_until_stopped(service: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Run ``service(stop)`` in an event loop until it returns. SIGTERM and SIGINT set ``stop``. Raises: its errors."""
    asyncio.run(_with_signals(service))


async def _with_signals(service: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def request_stop(number: signal.Signals) -> None:
        log.info("stop_requested", signal=number.name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, request_stop, number)
    await service(stop)


async def until_stopped(stop: asyncio.Event, timeout_s: float) -> bool:
    """Wait for ``timeout_s`` or until ``stop`` is set, whichever comes first. Returns True when ``stop`` was set."""
    try:
        async with asyncio.timeout(timeout_s):
            await stop.wait()
    except TimeoutError:
        return False
    return True


def die_with_parent(number: signal.Signals = signal.SIGTERM, *, parent_pid: int | None = None) -> None:
    """Ask the kernel (Linux) to send ``number`` when the parent ends, however it ends. Elsewhere this does nothing.

    If ``parent_pid`` is given and that parent is gone already, the signal is sent at once.
    """
    if _LIBC is not None:
        _LIBC.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
        if parent_pid is not None and os.getppid() != parent_pid:
            os.kill(os.getpid(), number)


def leave(status: int) -> NoReturn:
    """Flush the standard streams and end the process, without the interpreter's own clean-up.

    For processes with a process group of torch.distributed. gloo's threads outlive ``destroy_process_group`` while anything
    in DeepSpeed refers to the group. A thread that the clean-up finds running makes C++ abort the process ("terminate called
    without an active exception"), which then ends by SIGABRT although it has done all its work.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)

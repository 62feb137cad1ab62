"""Start and stop of a process: signals set one event, everything else lives in the service's TaskGroup."""

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from services.runtime.net.channel import EndpointError
from services.runtime.settings.configuration import ConfigurationError

log = structlog.get_logger()

EXIT_FAILED: Final = 1
EXIT_CONFIGURATION: Final = 2
EXIT_REPLACED: Final = 3
EXIT_OCCUPIED: Final = 4
PR_SET_PDEATHSIG: Final = 1
# Opened before any fork: a child between fork and exec must not load anything.
_LIBC: Final = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class ServiceError(RuntimeError):
    """The process cannot go on; the text says what, the value, and the way out. Ends the process with status 1."""


class ReplacedError(ServiceError):
    """Another process has taken this one's place at the broker. Ends the process with status 3: whoever started it must not
    start it again, because it would take the place back, and the other one in turn, for ever."""


class OccupiedError(ServiceError):
    """Another process has the place that this one asked for, and lives. Ends the process with status 4: it may be started
    again, and gets the place when the other one has ended.
    """


def run_process(service: Callable[[asyncio.Event], Awaitable[None]]) -> int:
    """Run ``service(stop)`` until it returns; SIGTERM and SIGINT set ``stop``. Returns the exit status.

    Errors meant for people end with one log line and no traceback; bugs end with their traceback.
    """
    status = 0
    try:
        asyncio.run(_with_signals(service))
    except* (ConfigurationError, EndpointError) as group:
        for error in flatten(group):
            log.error("cannot_start", error=str(error))
        status = EXIT_CONFIGURATION
    except* ReplacedError as group:
        for error in flatten(group):
            log.error("replaced", error=str(error))
        status = EXIT_REPLACED
    except* OccupiedError as group:
        for error in flatten(group):
            log.error("occupied", error=str(error))
        status = EXIT_OCCUPIED
    except* ServiceError as group:
        for error in flatten(group):
            log.error("stopped_by_error", error=str(error))
        status = EXIT_FAILED
    return status


async def _with_signals(service: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def request_stop(number: signal.Signals) -> None:
        log.info("stop_requested", signal=number.name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, request_stop, number)
    await service(stop)


def flatten(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    """The leaves of an exception group."""
    leaves: list[BaseException] = []
    for error in group.exceptions:
        leaves.extend(flatten(error) if isinstance(error, BaseExceptionGroup) else [error])
    return leaves


async def until_stopped(stop: asyncio.Event, timeout_s: float) -> bool:
    """Wait ``timeout_s`` or until ``stop`` is set, whichever is first. True: stop was set."""
    try:
        async with asyncio.timeout(timeout_s):
            await stop.wait()
    except TimeoutError:
        return False
    return True


def die_with_parent(number: signal.Signals = signal.SIGTERM, *, parent_pid: int | None = None) -> None:
    """Ask the kernel (Linux) to send ``number`` when the parent ends, however that happens; a no-op elsewhere.

    ``parent_pid``, where it is known: the signal is sent at once when that parent is gone already.
    """
    if _LIBC is not None:
        _LIBC.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
        if parent_pid is not None and os.getppid() != parent_pid:
            os.kill(os.getpid(), number)

"""Errors meant for people: each ends the process with one log line, no traceback, and an exit status of its own."""

from collections.abc import Callable
from typing import Final

import structlog

log = structlog.get_logger()

EXIT_FAILED: Final = 1
EXIT_CONFIGURATION: Final = 2
EXIT_REPLACED: Final = 3
EXIT_OCCUPIED: Final = 4


class ConfigurationError(ValueError):
    """A setting, or what it names, cannot be used; the text says what to change. Ends the process with status 2."""


class EndpointError(RuntimeError):
    """A socket cannot be bound to, or connected to, an endpoint. Ends the process with status 2."""


class ServiceError(RuntimeError):
    """The process cannot continue; the text names the cause, the value and what to do. Ends the process with status 1."""


class ReplacedError(ServiceError):
    """Another process has taken this one's place at the broker. Ends the process with status 3.

    It must not be restarted: the two would take the place from each other for ever.
    """


class OccupiedError(ServiceError):
    """Another live process has the place that this one asked for. Ends the process with status 4.

    Restarted, it gets the place once the other one has ended.
    """


def exit_status(run: Callable[[], int | None]) -> int:
    """Call ``run`` and return the process's exit status: the one it returns, or that of the error it ends with.

    An error meant for people becomes one log line. A bug is raised.
    """
    status = 0
    try:
        status = run() or 0
    except* (ConfigurationError, EndpointError) as group:
        status = _log("cannot_start", group, EXIT_CONFIGURATION)
    except* ReplacedError as group:
        status = _log("replaced", group, EXIT_REPLACED)
    except* OccupiedError as group:
        status = _log("occupied", group, EXIT_OCCUPIED)
    except* ServiceError as group:
        status = _log("stopped_by_error", group, EXIT_FAILED)
    return status


def _log(event: str, group: BaseExceptionGroup[BaseException], status: int) -> int:
    for error in flatten(group):
        log.error(event, error=str(error))
    return status


def flatten(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    """The leaves of an exception group."""
    leaves: list[BaseException] = []
    for error in group.exceptions:
        leaves.extend(flatten(error) if isinstance(error, BaseExceptionGroup) else [error])
    return leaves

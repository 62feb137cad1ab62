"""Errors meant for people: each ends the process with one log line, no traceback, and its own exit status.

A full disk has its own status, whatever the process was doing: a process that could not start for lack of room has no
wrong configuration, and works once there is room.
"""

import errno
import os
import sys
from collections.abc import Callable
from typing import Final, NamedTuple

from gspo_services.shared.runtime.plain_text import indented_lines

EXIT_FAILED: Final = 1
EXIT_CONFIGURATION: Final = 2
EXIT_REPLACED: Final = 3
EXIT_DAMAGED: Final = 3
"""The same as for a replaced process: it must not be restarted before a person has looked."""
EXIT_OCCUPIED: Final = 4
EXIT_NO_ROOM: Final = 5
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
_NO_ROOM_TEXTS: Final = (*map(os.strerror, _NO_ROOM), "database or disk is full")
"""The texts of the C library and SQLite: libraries put them into errors of other classes."""


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


class DiskDamageError(ServiceError):
    """What is on disk is damaged, or something that was acknowledged is missing. Ends the process with status 3.

    It must not be restarted: it would find the same, or write over what is left. A person has to look.
    """


class OccupiedError(ServiceError):
    """Another live process has the place that this one asked for. Ends the process with status 4.

    Restarted, it gets the place once the other one has ended.
    """


class NoRoomError(ServiceError):
    """A disk is full. Ends the process with status 5: started again, it works once there is room."""


def exit_status(run: Callable[[], int | None]) -> int:
    """Call ``run`` and return the process's exit status: the one it returns, or that of the error it ends with.

    Errors meant for people become log lines, and of several the one that forbids a restart decides. A bug is raised.
    """
    try:
        return run() or 0
    except BaseException as error:
        # Imported here, not with the module, which `gspo --help` imports: it takes a tenth of a second.
        from structlog import get_logger

        log = get_logger()
        leaves = flatten(error) if isinstance(error, BaseExceptionGroup) else [error]
        known = sorted((end, index) for index, leaf in enumerate(leaves) if (end := _end_of(leaf)) is not None)
        if not known or (len(known) < len(leaves) and known[0][0] not in _FORBIDDING):
            raise
        for leaf in leaves:
            if _end_of(leaf) is None:
                log.error("failed_beside", exc_info=leaf)
        # The decisive one comes last: a supervisor reads the last line.
        for end, index in reversed(known):
            log.error(_ENDS[end].event, error=str(leaves[index]))
        return _ENDS[known[0][0]].status


def tell(error: BaseException, command: str) -> list[BaseException]:
    """Say on standard error what ended ``command``, and return the errors meant for people. Raises: ``error``, for a bug."""
    leaves = flatten(error) if isinstance(error, BaseExceptionGroup) else [error]
    kinds = (ConfigurationError, EndpointError, ServiceError, OSError)
    known: list[BaseException] = [leaf for leaf in leaves if isinstance(leaf, kinds)]
    if not known:
        raise error
    for leaf in known:
        sys.stderr.write(indented_lines(f"{command}: {leaf}") + "\n")
    return known


class _End(NamedTuple):
    kinds: tuple[type[BaseException], ...]
    event: str
    status: int


_ENDS: Final = (
    _End((ReplacedError,), "replaced", EXIT_REPLACED),
    _End((DiskDamageError,), "damaged", EXIT_DAMAGED),
    _End((OccupiedError,), "occupied", EXIT_OCCUPIED),
    _End((NoRoomError,), "no_room", EXIT_NO_ROOM),
    _End((ServiceError,), "stopped_by_error", EXIT_FAILED),
    _End((ConfigurationError, EndpointError), "cannot_start", EXIT_CONFIGURATION),
)
"""The possible ends of a process, the most important first."""
_FORBIDDING: Final = (0, 1, 2)
_NO_ROOM_END: Final = 3


def _end_of(error: BaseException) -> int | None:
    """The place of ``error`` in _ENDS; None for a bug."""
    found = next((index for index, end in enumerate(_ENDS) if isinstance(error, end.kinds)), None)
    return _NO_ROOM_END if found not in _FORBIDDING and is_for_want_of_room(error) else found


def is_for_want_of_room(error: BaseException) -> bool:
    """Return whether a full disk has caused the error, directly or through another one."""
    cause: BaseException | None = error
    while cause is not None:
        is_full = isinstance(cause, OSError) and cause.errno in _NO_ROOM
        if is_full or (isinstance(cause, Exception) and any(text in str(cause) for text in _NO_ROOM_TEXTS)):
            return True
        cause = cause.__cause__
    return False


def flatten(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    """Return the leaves of an exception group."""
    leaves: list[BaseException] = []
    for error in group.exceptions:
        leaves.extend(flatten(error) if isinstance(error, BaseExceptionGroup) else [error])
    return leaves

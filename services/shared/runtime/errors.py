"""Errors meant for people: each ends the process with one log line, no traceback, and its own exit status.

A full disk has its own status, whatever the process was doing: a process that could not start for lack of room has no
wrong configuration, and works once there is room. Nor has one that met a fault that passes, such as a network file system
that was away: it ends as one that may be started again.
"""

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from gspo_services.shared.runtime.plain_text import indented_lines

EXIT_FAILED: Final = 1
EXIT_CONFIGURATION: Final = 2
EXIT_REPLACED: Final = 3
EXIT_DAMAGED: Final = 3
"""The same as for a replaced process: it must not be restarted before a person has looked."""
EXIT_OCCUPIED: Final = 4
EXIT_NO_ROOM: Final = 5
EXIT_UNPROVEN: Final = 6
EXIT_INTERRUPTED: Final = 130
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
_NO_ROOM_TEXTS: Final = (*map(os.strerror, _NO_ROOM), "database or disk is full")
"""The texts of the C library and SQLite: libraries put them into errors of other classes."""
_PASSING: Final = (
    errno.EINTR, errno.EIO, errno.EAGAIN, errno.ENOMEM, errno.EBUSY, errno.ENFILE, errno.EMFILE, errno.ETXTBSY, errno.EPIPE,
    errno.EADDRINUSE, errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.ECONNABORTED, errno.ECONNRESET,
    errno.ENOTCONN, errno.ETIMEDOUT, errno.ECONNREFUSED, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ESTALE, errno.EREMOTEIO,
)  # fmt: skip
"""What no setting causes: a signal, little memory, many files, a taken port, a disk or a network that is away."""
_PASSING_TEXTS: Final = (*map(os.strerror, _PASSING), "disk I/O error", "database is locked", "name resolution")


class ConfigurationError(ValueError):
    """A setting, or what it names, cannot be used; the text says what to change. Ends the process with status 2."""


class UnprovenError(ConfigurationError):
    """What a setting names did not work, and may the next time: another process tried it. Ends the process with status 6.

    ``gspo run`` takes it for an error of the configuration when it comes twice in a row.
    """


class PassingFault(Exception):
    """What no setting causes, such as a signal that ended a child: raise the error for people from one, or as one."""


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
    _End((UnprovenError,), "cannot_start", EXIT_UNPROVEN),
    _End((ConfigurationError, EndpointError), "cannot_start", EXIT_CONFIGURATION),
)
"""The possible ends of a process, the most important first."""
_FORBIDDING: Final = (0, 1, 2)
_NO_ROOM_END: Final = 3
_FAILED_END: Final = 4


def _end_of(error: BaseException) -> int | None:
    """The place of ``error`` in _ENDS; None for a bug."""
    found = next((index for index, end in enumerate(_ENDS) if isinstance(error, end.kinds)), None)
    if found not in _FORBIDDING and is_for_want_of_room(error):
        return _NO_ROOM_END
    return _FAILED_END if found is not None and found > _FAILED_END and _may_pass(error) else found


def is_for_want_of_room(error: BaseException) -> bool:
    """Return whether a full disk has caused the error, directly or through another one."""
    return any(_number(cause) in _NO_ROOM or _says(cause, _NO_ROOM_TEXTS) for cause in _causes(error))


def _may_pass(error: BaseException) -> bool:
    """Return whether a fault that no setting can have has caused the error, directly or through another one."""
    return any(
        isinstance(cause, PassingFault | MemoryError | TimeoutError | ConnectionError)
        or _number(cause) in _PASSING
        or _says(cause, _PASSING_TEXTS)
        for cause in _causes(error)
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it was raised from."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _number(error: BaseException) -> int | None:
    """The operating system's number of the error. ZeroMQ's errors have one, too."""
    number = getattr(error, "errno", None)
    return number if isinstance(number, int) else None


def _says(error: BaseException, texts: tuple[str, ...]) -> bool:
    return isinstance(error, Exception) and any(text in str(error) for text in texts)


def flatten(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    """Return the leaves of an exception group."""
    leaves: list[BaseException] = []
    for error in group.exceptions:
        leaves.extend(flatten(error) if isinstance(error, BaseExceptionGroup) else [error])
    return leaves


@contextmanager
def ended_by(*kinds: type[Exception], what: str = "") -> Iterator[None]:
    """Make one ServiceError of a group of these errors, with the first one's text after ``what``."""
    failed = None
    try:
        yield
    except* kinds as errors:
        failed = errors  # Raised below: Python 3.11.2 wraps what is raised here in a group.
    if failed is not None:
        raise ServiceError(f"{what}{flatten(failed)[0]}") from failed

"""Standard output and standard error that do not determine how a process ends.

Python gives a process another exit status when a standard stream cannot be written or flushed, and a supervisor reads the
status: 3 and 4 say that the process must not be started again.
"""

import io
import json
import os
import signal
import sys
import threading
from contextlib import suppress
from datetime import UTC, datetime
from typing import NoReturn, TextIO, cast

from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.runtime.log_files import LogFile


class OutputError(ConfigurationError):
    """The result of a command cannot be written to standard output."""


class _DescriptorOutput(io.RawIOBase):
    """The raw side of a text stream on ``descriptor``, which stays open."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True


class PatientOutput(_DescriptorOutput):
    """Writes to a descriptor and never fails: a full disk must cost lines of the log, not the process.

    Once writing works again, a line says how often it did not.
    """

    def __init__(self, descriptor: int, log_file: LogFile | None = None) -> None:
        """``log_file``: the log that ``descriptor`` writes to, if this process rotates it."""
        super().__init__(descriptor)
        self._log_file = log_file
        self._lost = 0
        self._cut = False

    def write(self, data: bytes | memoryview) -> int:  # type: ignore[override]
        """Write all of ``data``, or lose it. Returns its length."""
        content = bytes(data)
        if self._log_file is not None:
            self._log_file.keep_small(self._descriptor)
        lost = self._lost and not self._write(self._apology())
        self._lost = self._lost + 1 if lost or not self._write(content) else 0
        return len(content)

    def _apology(self) -> bytes:
        line = {"event": "log_lines_lost", "level": "warning", "number": self._lost}
        begin = b"\n" if self._cut else b""
        return begin + json.dumps(line | {"timestamp": datetime.now(tz=UTC).isoformat()}).encode() + b"\n"

    def _write(self, content: bytes) -> bool:
        done = 0
        try:
            while done < len(content):
                done += os.write(self._descriptor, content[done:])
        except OSError:
            self._cut = self._cut or done > 0
            return False
        self._cut = False
        return True


class ResultOutput(_DescriptorOutput):
    """Standard output of a command that prints its result.

    A reader that has seen enough (``gspo audit | head``) changes nothing, not even the exit status.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        self._unread = False

    def write(self, data: bytes | memoryview) -> int:  # type: ignore[override]
        """Write all of ``data`` unless nobody reads it. Raises: OutputError when there is no room for it."""
        content, done = bytes(data), 0
        while done < len(content) and not self._unread:
            try:
                done += os.write(self._descriptor, content[done:])
            except BrokenPipeError:
                self._unread = True
            except OSError as error:
                self._unread = True
                raise OutputError(f"standard output cannot be written: {error.strerror}; print to another place") from error
        return len(content)


def forgive_output() -> None:
    """Let this process's standard streams lose what cannot be written; rotate the log that ``gspo run`` made of them."""
    log_file = LogFile.of(os.environ)
    if log_file is not None and not log_file.is_behind(2):
        log_file = None
    if _is(sys.stderr, 2):
        sys.stderr = _text(PatientOutput(2, log_file), sys.stderr)
    if _is(sys.stdout, 1):
        sys.stdout = _text(PatientOutput(1, log_file), sys.stdout)
    if log_file is not None:
        log_file.watch(1, 2)


def begin_command() -> None:
    """Let this process be a command of a person: its result goes to standard output, and SIGTERM ends it as Ctrl-C does.

    Without that a SIGTERM would leave the half of what it writes.
    """
    protect_result()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, _: object) -> NoReturn:
    # A second one ends at once whatever takes so long.
    signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt


def protect_result() -> None:
    """Let standard output be what a command's result is written to."""
    if _is(sys.stdout, 1):
        sys.stdout = _text(ResultOutput(1), sys.stdout)


def _is(stream: TextIO | None, descriptor: int) -> bool:
    """Return whether ``stream`` is Python's own for ``descriptor``, and not a test's or a notebook's."""
    if not isinstance(stream, io.TextIOWrapper) or isinstance(stream.buffer, _DescriptorOutput):
        return False
    try:
        return stream.fileno() == descriptor
    except (OSError, ValueError):
        return False


def _text(raw: io.RawIOBase, former: TextIO) -> TextIO:
    with suppress(OSError):
        former.flush()
    # A line is written at once, so that lines of several processes in one file are whole.
    stream = io.TextIOWrapper(cast("io.BufferedWriter", raw), former.encoding, "backslashreplace", line_buffering=True)
    return cast("TextIO", stream)

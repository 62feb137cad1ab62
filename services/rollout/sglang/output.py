"""Copies an SGLang server's output into a log of bounded size.

SGLang cannot rotate a file that is its standard output, so a thread reads the output from a pipe. A server may wait for its
rollout there without harm: it has no other client.
"""

import array
import fcntl
import os
import select
import termios
import threading
from typing import Final

from gspo_services.shared.runtime.log_files import LogFile
from gspo_services.shared.runtime.output import PatientOutput

_READ_BYTES: Final = 65_536
_DRAIN_S: Final = 2.0
_LOOK_S: Final = 0.01
_KEPT_BYTES: Final = 65_536


class ServerOutput:
    """A pipe for a server's output, and the thread that copies it into a log until the server's last process has ended."""

    def __init__(self, log_file: LogFile) -> None:
        """Raises: OSError when the log cannot be written."""
        self._file = os.open(log_file.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._log = PatientOutput(self._file, log_file)
        self._source, self.sink = os.pipe()
        self._copying = threading.Lock()
        self._end = b""
        self._ended = threading.Event()
        threading.Thread(target=self._copy, name="sglang-output", daemon=True).start()

    def close_sink(self) -> None:
        """Close our end of ``sink``, which the server has by now, or never will."""
        os.close(self.sink)

    def drain(self) -> None:
        """Wait until the log has what was printed so far; but only briefly, for a server that keeps printing."""
        for _ in range(round(_DRAIN_S / _LOOK_S)):
            with self._copying:
                if self._ended.is_set() or not _num_unread(self._source):
                    return
            self._ended.wait(_LOOK_S)

    @property
    def end(self) -> str:
        """The last that this server printed, without what servers before it left in the log."""
        return self._end.decode(errors="replace")

    def _copy(self) -> None:
        content = b"x"
        while content:
            # Outside the lock, so that its holder sees either unread output or none in progress.
            select.select([self._source], [], [])
            with self._copying:
                content = os.read(self._source, _READ_BYTES)
                self._log.write(content)
                self._end = (self._end + content)[-_KEPT_BYTES:]
        with self._copying:
            self._ended.set()
            os.close(self._source)
            os.close(self._file)


def _num_unread(pipe: int) -> int:
    number = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, number)
    return number[0]

"""An end to a wait for the server."""

import socket
import threading
from contextlib import closing, suppress


class Deadline:
    """Ends a connection when the block takes too long. The statement is not cancelled: that would end its wait for the
    standby, but not the commit. Its outcome is looked up later."""

    def __init__(self, descriptor: int, seconds: float) -> None:
        self.expired = False
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._is_over = False
        self._timer = threading.Timer(seconds, self._expire)
        self._timer.name, self._timer.daemon = "database-deadline", True

    def __enter__(self) -> "Deadline":
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            self._is_over = True

    def _expire(self) -> None:
        with self._lock:
            if self._is_over:
                return
            self.expired = True
            with suppress(OSError), closing(socket.fromfd(self._descriptor, socket.AF_INET, socket.SOCK_STREAM)) as copy:
                copy.shutdown(socket.SHUT_RDWR)

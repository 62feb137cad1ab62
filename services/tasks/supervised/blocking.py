"""A supervised process for threads, which may wait."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from gspo_services.shared.runtime.stray_processes import MARK, kill_marked, new_mark
from gspo_services.tasks.supervised.messages import length_of
from gspo_services.tasks.worker.frames import LENGTH, frame


class BlockingProcess:
    """One process and its descendants. It starts at once; one thread at a time speaks with it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, output: int = subprocess.DEVNULL) -> None:
        """``output``: the descriptor for all that it prints. Raises: OSError when there is no such program."""
        self._mark = new_mark()
        self._connection, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    command, stdin=theirs.fileno(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                    env={**environment, MARK: self._mark},
                )  # fmt: skip
            except BaseException:
                self._connection.close()
                raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, body: bytes, patience_s: float) -> None:
        """Raises: TimeoutError when it does not read; ConnectionError when it has ended."""
        self._connection.settimeout(patience_s)
        self._connection.sendall(frame(body))

    def receive(self, patience_s: float) -> bytes:
        """The next message. Raises: TimeoutError; ConnectionError when it has ended, of it BadMessage."""
        until = time.monotonic() + patience_s
        return self._exactly(length_of(self._exactly(LENGTH.size, until)), until)

    def _exactly(self, num_bytes: int, until: float) -> bytes:
        pieces = bytearray()
        while len(pieces) < num_bytes:
            # Zero would not wait at all, and say so in another way.
            self._connection.settimeout(max(until - time.monotonic(), 0.001))
            piece = self._connection.recv(num_bytes - len(pieces))
            if not piece:
                raise ConnectionResetError("the connection has ended")
            pieces += piece
        return bytes(pieces)

    def status(self, patience_s: float) -> int | None:
        """How the process itself has ended; None when it goes on for so long."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(patience_s)
        return None

    def close(self) -> None:
        """End it and everything that it has started. May be called twice."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        kill_marked(self._mark, self.pid)
        self._connection.close()

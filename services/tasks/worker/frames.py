"""Messages between a worker and its parent: a 4-byte big-endian length and that many bytes of JSON, over one socket."""

import json
import os
import signal
import socket
import struct
import threading
from typing import Any

LENGTH = struct.Struct(">I")


def end_with_group(status: int) -> None:
    """End this process and what the user's code has started in its group."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(status)


class FrameSocket:
    """The worker's end. Any thread may write; one thread reads."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(True)
        self._socket.set_inheritable(False)
        self._lock = threading.Lock()
        # A fork of the user's code must not speak for this process, nor keep the connection open when this one ends.
        os.register_at_fork(after_in_child=self._forget)

    def send(self, message: dict[str, Any]) -> None:
        """Send one message. A broken connection ends the process: nobody is left to work for."""
        body = json.dumps(message, allow_nan=False).encode()
        with self._lock:
            try:
                self._socket.sendall(LENGTH.pack(len(body)) + body)
            except OSError:
                end_with_group(1)

    def receive(self) -> dict[str, Any] | None:
        """The next message; None when the parent is gone."""
        head = self._exactly(LENGTH.size)
        body = None if head is None else self._exactly(LENGTH.unpack(head)[0])
        if body is None:
            return None
        message: dict[str, Any] = json.loads(body)
        return message

    def _exactly(self, num_bytes: int) -> bytes | None:
        pieces = bytearray()
        while len(pieces) < num_bytes:
            try:
                piece = self._socket.recv(num_bytes - len(pieces))
            except OSError:
                return None
            if not piece:
                return None
            pieces += piece
        return bytes(pieces)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._socket.close()

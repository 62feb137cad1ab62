"""Messages between a process and its parent: a 4-byte big-endian length and that many bytes, over one socket."""

import json
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

LENGTH = struct.Struct(">I")
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""Of what a process says."""


def frame(body: bytes) -> bytes:
    """A message as it is sent."""
    return LENGTH.pack(len(body)) + body


def end_with_group(status: int) -> None:
    """End this process and what the user's code has started in its group."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(status)


def _as_json(message: "dict[str, Any]") -> bytes:
    return json.dumps(message, allow_nan=False).encode()


class FrameSocket:
    """The process's end, which its parent gives it as standard input. Any thread may write; one thread reads.

    From then on standard input leads nowhere: code of users finds no message there, whatever it reads or closes.
    """

    def __init__(
        self, encode: "Callable[[dict[str, Any]], bytes]" = _as_json, decode: "Callable[[bytes], Any]" = json.loads
    ) -> None:
        """``encode`` and ``decode``: a message as bytes; JSON if nothing is said."""
        self._encode = encode
        self._decode = decode
        self._socket = socket.socket(fileno=os.dup(0))
        self._socket.setblocking(True)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        self._lock = threading.Lock()
        # A fork of the user's code must not speak for this process, nor keep the connection open when this one ends.
        os.register_at_fork(after_in_child=self._forget)

    def send(self, message: "dict[str, Any]") -> None:
        """Send one message. A broken connection ends the process: nobody is left to work for."""
        whole = frame(self._encode(message))
        with self._lock:
            try:
                self._socket.sendall(whole)
            except OSError:
                end_with_group(1)

    def receive(self) -> "dict[str, Any] | None":
        """The next message; None when the parent is gone."""
        head = self._exactly(LENGTH.size)
        body = None if head is None else self._exactly(LENGTH.unpack(head)[0])
        if body is None:
            return None
        message: dict[str, Any] = self._decode(body)
        return message

    def listen(self, deliver: "Callable[[dict[str, Any]], Any]", at_the_end: "Callable[[], Any]" = lambda: None) -> None:
        """Deliver in a thread what the parent sends. Its end, or what is no message, ends this process, even a busy one.

        ``at_the_end``: the last that this process does then.
        """
        threading.Thread(target=self._listen, args=(deliver, at_the_end), name="read-messages", daemon=True).start()

    def _listen(self, deliver: "Callable[[dict[str, Any]], Any]", at_the_end: "Callable[[], Any]") -> None:
        try:
            while (message := self.receive()) is not None:
                deliver(message)
            at_the_end()
        finally:
            end_with_group(1)

    def _exactly(self, num_bytes: int) -> "bytes | None":
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

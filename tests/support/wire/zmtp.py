"""A ZMTP 3.0 peer (NULL mechanism) over a plain TCP socket, which sends what no ZeroMQ library would send."""

import socket
import struct
from collections.abc import Iterable
from types import TracebackType
from typing import Final, Self

GREETING: Final = b"\xff" + bytes(8) + b"\x7f" + bytes([3, 0]) + b"NULL".ljust(20, b"\0") + bytes(32)
MORE, LARGE, COMMAND = 1, 2, 4
LENGTH: Final = struct.Struct("!Q")


def frame(body: bytes, *, more: bool = False) -> bytes:
    """One frame of a message."""
    flags = MORE if more else 0
    if len(body) > 255:
        return bytes([flags | LARGE]) + LENGTH.pack(len(body)) + body
    return bytes([flags, len(body)]) + body


def message(frames: Iterable[bytes]) -> bytes:
    """All frames of a message."""
    *first, last = frames
    return b"".join(frame(bytes(body), more=True) for body in first) + frame(bytes(last))


def command(name: bytes, body: bytes) -> bytes:
    content = bytes([len(name)]) + name + body
    return bytes([COMMAND, len(content)]) + content


def ping(ttl_tenths: int = 0) -> bytes:
    """A heartbeat, which the other end answers; ``ttl_tenths``: after how long a silence it may hang up."""
    return command(b"PING", struct.pack("!H", ttl_tenths) + b"context")


class ZmtpPeer:
    """One connection as a DEALER, past its handshake. Use as a context manager."""

    def __init__(self, port: int, identity: bytes) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=20)
        try:
            self._shake_hands(identity)
        except BaseException:
            # The other end may break the connection at any moment.
            self.socket.close()
            raise

    def _shake_hands(self, identity: bytes) -> None:
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(GREETING)
        self._read(64)
        properties = _property(b"Socket-Type", b"DEALER") + _property(b"Identity", identity)
        self.socket.sendall(command(b"READY", properties))
        flags, length = self._read(2)
        assert flags == COMMAND, flags
        self._read(length)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        """Send raw bytes. Raises: OSError when the other end has hung up."""
        self.socket.sendall(data)

    def send_for(self, data: bytes, wait_s: float) -> int:
        """Send until the other end takes nothing more for ``wait_s``; returns the number of bytes sent."""
        self.socket.settimeout(wait_s)
        sent = 0
        try:
            while sent < len(data):
                sent += self.socket.send(data[sent : sent + 65536])
        except TimeoutError:
            pass
        return sent

    def reset(self) -> None:
        """Break the connection with a reset instead of an end."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            got = self.socket.recv(size - len(data))
            if not got:
                raise ConnectionResetError("the other end hung up")
            data += got
        return data


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + struct.pack("!I", len(value)) + value

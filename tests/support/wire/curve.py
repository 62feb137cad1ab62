"""A ZMTP 3.0 peer with a CURVE key, which encrypts what no ZeroMQ library would send (rfc.zeromq.org/spec/26).

It takes libsodium from the process, where pyzmq has loaded it. Linux only.
"""

import ctypes
import os
import re
import socket
import struct
from pathlib import Path
from typing import Final

import zmq
from zmq.utils import z85

from gspo_services.shared.net import Security
from tests.support.wire.zmtp import COMMAND, ZmtpPeer, frame

GREETING: Final = b"\xff" + bytes(8) + b"\x7f" + bytes([3, 0]) + b"CURVE".ljust(20, b"\0") + bytes(32)
MAC_BYTES: Final = 16
MORE: Final = 1


def _sodium() -> ctypes.CDLL:
    assert zmq.has("curve")
    (path,) = set(re.findall(r"(/\S*libsodium\S*)", Path("/proc/self/maps").read_text()))
    return ctypes.CDLL(path)


class CurvePeer(ZmtpPeer):
    """One encrypted connection as a DEALER, past its handshake, with the key of ``security``. Use as a context manager."""

    def __init__(self, port: int, identity: bytes, security: Security) -> None:
        """Raises: ConnectionRefusedError when the other end does not admit the key."""
        assert security.own is not None
        self._lib = _sodium()
        self._counter = 0
        server, (public, secret) = (
            z85.decode(security.server_key("broker")),
            map(z85.decode, (security.own.public, security.own.secret)),
        )
        short_public, short_secret = map(z85.decode, zmq.curve_keypair())
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=20)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(GREETING)
        self._read(64)
        nonce = self._next()
        box = self._box(bytes(64), b"CurveZMQHELLO---" + nonce, server, short_secret)
        self._command(b"\5HELLO" + bytes([1, 0]) + bytes(72) + short_public + nonce + box)
        welcome = self._answer(b"\7WELCOME")
        opened = self._open(welcome[16:], b"WELCOME-" + welcome[:16], server, short_secret)
        connection, cookie = opened[:32], opened[32:]
        vouch_nonce = os.urandom(16)
        vouch = self._box(short_public + server, b"VOUCH---" + vouch_nonce, connection, secret)
        metadata = b"".join(
            bytes([len(name)]) + name + struct.pack("!I", len(value)) + value
            for name, value in ((b"Socket-Type", b"DEALER"), (b"Identity", identity))
        )
        nonce = self._next()
        self._key = connection, short_secret
        box = self._box(public + vouch_nonce + vouch + metadata, b"CurveZMQINITIATE" + nonce, *self._key)
        self._command(b"\x08INITIATE" + cookie + nonce + box)
        self._answer(b"\5READY")

    def sealed(self, body: bytes, *, more: bool) -> bytes:
        """One frame of a message, encrypted. Each must be sent, in order."""
        nonce = self._next()
        box = self._box(bytes([MORE if more else 0]) + body, b"CurveZMQMESSAGEC" + nonce, *self._key)
        return frame(b"\x07MESSAGE" + nonce + box)

    def _next(self) -> bytes:
        self._counter += 1
        return struct.pack("!Q", self._counter)

    def _box(self, text: bytes, nonce: bytes, public: bytes, secret: bytes) -> bytes:
        out = ctypes.create_string_buffer(len(text) + MAC_BYTES)
        assert self._lib.crypto_box_easy(out, text, ctypes.c_ulonglong(len(text)), nonce, public, secret) == 0
        return out.raw

    def _open(self, box: bytes, nonce: bytes, public: bytes, secret: bytes) -> bytes:
        out = ctypes.create_string_buffer(len(box) - MAC_BYTES)
        assert self._lib.crypto_box_open_easy(out, box, ctypes.c_ulonglong(len(box)), nonce, public, secret) == 0
        return out.raw

    def _command(self, content: bytes) -> None:
        if len(content) > 255:
            self.socket.sendall(bytes([COMMAND | 2]) + struct.pack("!Q", len(content)) + content)
        else:
            self.socket.sendall(bytes([COMMAND, len(content)]) + content)

    def _answer(self, name: bytes) -> bytes:
        flags, length = self._read(2)
        assert flags == COMMAND, flags
        content = self._read(length)
        if content.startswith(b"\5ERROR"):
            self.socket.close()
            raise ConnectionRefusedError(content[7:].decode())
        assert content.startswith(name), content[:10]
        return content[len(name) :]

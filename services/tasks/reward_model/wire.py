"""Messages between the process of a reward model and its clients: msgpack over a Unix socket."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import struct
from typing import Any, Final

import msgpack
import msgspec

from gspo_services.tasks.reward_model.options import RewardModelOptions
from gspo_services.tasks.supervised import BadMessage, read_frame
from gspo_services.tasks.worker.frames import frame

_PEER: Final = struct.Struct("3i")


def address_of(options: RewardModelOptions) -> str:
    """The name of the socket: abstract, so that the kernel lets one process have it and frees it however that one ends."""
    said = msgspec.json.encode([os.getuid(), options], order="deterministic")
    return "\0gspo-reward-model-" + hashlib.blake2b(said, digest_size=16).hexdigest()


def require_own(peer: socket.socket) -> None:
    """Raises: ConnectionError when the other end is another user's: an abstract socket has no permissions."""
    _, uid, _ = _PEER.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if uid != os.getuid():
        raise ConnectionAbortedError(f"the other end of the socket belongs to user {uid}")


def packed(message: dict[str, Any]) -> bytes:
    """One message. Raises: TypeError, ValueError or OverflowError for what is not plain data."""
    return frame(msgpack.packb(message))


async def read_message(stream: asyncio.StreamReader) -> dict[str, Any]:
    """The next message. Raises: ConnectionError at the end, and for what is no message."""
    try:
        message = msgpack.unpackb(await read_frame(stream))
    except (ValueError, msgpack.UnpackException) as error:
        raise BadMessage(f"what came is no message: {error}") from error
    if not isinstance(message, dict):
        raise BadMessage("what came is no message")
    return message

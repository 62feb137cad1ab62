"""Messages of a process that may say anything, or end in the middle of one."""

from __future__ import annotations

from asyncio import IncompleteReadError, StreamReader

from gspo_services.tasks.worker.frames import LENGTH, MAX_MESSAGE_BYTES


class BadMessage(ConnectionError):
    """What came is no message: nothing that follows can be read, and whoever sent it is ended."""


def length_of(head: bytes, most_bytes: int = MAX_MESSAGE_BYTES) -> int:
    """How many bytes follow. Raises: BadMessage for more than ``most_bytes``."""
    length: int = LENGTH.unpack(head)[0]
    if length > most_bytes:
        raise BadMessage(f"a message of {length} bytes, {most_bytes} allowed")
    return length


async def read_frame(reader: StreamReader) -> bytes:
    """The next message. Raises: ConnectionError at the end of the connection; of it BadMessage."""
    try:
        return await reader.readexactly(length_of(await reader.readexactly(LENGTH.size)))
    except IncompleteReadError as error:
        raise ConnectionResetError("the connection has ended") from error

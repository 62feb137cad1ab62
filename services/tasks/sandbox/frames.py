"""Frames between init and whoever started it. What init says is checked like any peer's message."""

import asyncio
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gspo_services.tasks.sandbox.interface import SandboxError

MAX_HEADER_BYTES: Final = 1 << 16
MAX_BLOB_BYTES: Final = 256 << 20


def frame(header: Mapping[str, Any], blobs: Sequence[bytes]) -> bytes:
    """A request as bytes."""
    text = json.dumps({**header, "sizes": [len(blob) for blob in blobs]}).encode()
    return struct.pack(">I", len(text)) + text + b"".join(blobs)


async def read_frame(stream: asyncio.StreamReader) -> tuple[dict[str, Any], list[bytes]]:
    """An answer and its bytes. Raises: SandboxError when it ends early or is none."""
    try:
        (length,) = struct.unpack(">I", await stream.readexactly(4))
        if length > MAX_HEADER_BYTES:
            raise SandboxError(f"the sandbox's answer has a header of {length} bytes")
        header = json.loads(await stream.readexactly(length))
        sizes = header["sizes"]
        if not all(isinstance(size, int) and 0 <= size <= MAX_BLOB_BYTES for size in sizes) or len(sizes) > 2:
            raise SandboxError(f"the sandbox's answer has parts of {sizes!r:.100} bytes")
        return header, [await stream.readexactly(size) for size in sizes]
    except asyncio.IncompleteReadError as error:
        raise SandboxError("the sandbox has ended") from error
    except (ValueError, KeyError, TypeError) as error:
        raise SandboxError(f"the sandbox's answer cannot be read: {error}") from error

"""Frames on standard input and output: the length of a JSON header in four bytes, the header, the bytes of its ``sizes``."""

import json
import os
import struct
import sys
from typing import Any


def read_exactly(fd: int, num_bytes: int) -> bytes:
    """So many bytes; init ends when whoever started it has gone."""
    parts = []
    while num_bytes:
        part = os.read(fd, min(num_bytes, 1 << 20))
        if not part:
            sys.exit(0)
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


def read_frame() -> tuple[dict[str, Any], list[bytes]]:
    """A request and its bytes."""
    (length,) = struct.unpack(">I", read_exactly(0, 4))
    header = json.loads(read_exactly(0, length))
    return header, [read_exactly(0, size) for size in header["sizes"]]


def write_frame(header: dict[str, Any], *blobs: bytes) -> None:
    """An answer."""
    text = json.dumps({**header, "sizes": [len(blob) for blob in blobs]}).encode()
    rest = memoryview(struct.pack(">I", len(text)) + text + b"".join(blobs))
    while rest:
        rest = rest[os.write(1, rest) :]

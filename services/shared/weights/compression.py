"""zstd with a bound on its output: a frame must claim exactly the expected length. The learner compresses deltas, a rollout
decompresses them."""

from typing import Final

import zstandard

LEVEL: Final = 1
"""Higher levels take two to three times as long. They save a few percent where one element in a hundred has changed, and
cost as much where more have: a delta is entropy, with few repetitions."""


def compress(data: bytes | bytearray | memoryview) -> bytes:
    """Compress into one zstd frame that names its content's length. Several threads may call this at once."""
    return zstandard.ZstdCompressor(level=LEVEL, write_content_size=True).compress(data)


def decompress(frame: bytes | bytearray | memoryview, num_bytes: int) -> bytes:
    """Decompress the ``num_bytes`` bytes in ``frame``.

    Raises: ValueError when it is not a zstd frame or has another length; it never takes more memory than ``num_bytes``.
    """
    try:
        claimed = zstandard.frame_content_size(frame)
        if claimed != num_bytes:
            raise ValueError(f"compressed data holds {claimed} bytes, {num_bytes} expected")
        content = zstandard.ZstdDecompressor().decompress(frame, max_output_size=num_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"compressed data is damaged: {error}") from error
    if len(content) != num_bytes:
        raise ValueError(f"compressed data holds {len(content)} bytes, {num_bytes} expected")
    return content

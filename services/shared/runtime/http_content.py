"""The content of an HTTP answer, within a number of bytes: a peer that answers decides neither how long nor how much."""

from __future__ import annotations

from typing import Final

import aiohttp

PIECE_BYTES: Final = 256 * 1024
UNCOMPRESSED: Final = {"Accept-Encoding": "identity"}
"""A session that asks for this and has ``auto_decompress=False`` holds no more than was sent."""


class TooMuchContentError(ValueError):
    """An answer is larger than any that was asked for. The text does not name the peer."""


async def content_within(response: aiohttp.ClientResponse, num_bytes: int) -> bytes:
    """Read it. Raises: TooMuchContentError, once more than ``num_bytes`` came or are announced; aiohttp's errors.

    waits for:    the end of the answer
    unblocked by: the total timeout of the request, which the caller has to set
    """
    if (response.content_length or 0) > num_bytes:
        raise TooMuchContentError(f"announces {response.content_length:,} bytes, of at most {num_bytes:,}")
    content = bytearray()
    async for piece in response.content.iter_chunked(PIECE_BYTES):
        content += piece
        if len(content) > num_bytes:
            raise TooMuchContentError(f"has more than {num_bytes:,} bytes")
    return bytes(content)

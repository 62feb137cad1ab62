"""Fetch bytes of a version in chunks from one sender.

The receiver pulls: it asks for a window of chunks, so it never gets more than it can take, and it asks again for chunks that
did not come.
"""

import asyncio
from dataclasses import dataclass
from typing import Final, Protocol

import structlog

from gspo_protocol.messages import Manifest, WeightChunk, WeightGone, WeightRequest
from gspo_services.shared.net import PeerClient

log = structlog.get_logger()

STALL_S: Final = 5.0
MAX_STALLS: Final = 6
"""A fetch fails after this many silences in a row without a chunk."""
WINDOW_CHUNKS: Final = 16


class FetchError(RuntimeError):
    """A version could not be fetched completely, and nothing was written. The caller retries."""


class GoneError(FetchError):
    """The sender does not have that version (yet, or any more). ``newest_version`` is the newest that it has."""

    def __init__(self, policy_version: int, newest_version: int) -> None:
        super().__init__(f"version {policy_version} is gone, newest is {newest_version}")
        self.newest_version = newest_version


class ChunkSink(Protocol):
    """Where bytes go that are fetched in chunks."""

    def put(self, begin: int, data: memoryview) -> None:
        """Put the bytes from ``begin`` on."""


async def fetch_chunks(
    client: PeerClient,
    manifest: Manifest,
    place: ChunkSink,
    stall_s: float,
    max_stalls: int = MAX_STALLS,
    *,
    num_bytes: int | None = None,
    part: int = 0,
) -> None:
    """Put all bytes of ``manifest``, unchecked, into ``place``; fail after ``max_stalls`` silences in a row.

    ``num_bytes``: of one part of it; None: of all. ``part``: see ``WeightRequest``.
    Raises: FetchError; GoneError, its subclass.
    """
    wanted = _Wanted(manifest, place, manifest.num_bytes if num_bytes is None else num_bytes, part)
    num_chunks = -(-wanted.num_bytes // manifest.chunk_bytes)
    for first in range(0, num_chunks, WINDOW_CHUNKS):
        missing = set(range(first, min(first + WINDOW_CHUNKS, num_chunks)))
        stalls = 0
        while missing:
            asked = len(missing)
            lowest = min(missing)
            await client.send(
                WeightRequest(
                    policy_version=manifest.policy_version,
                    base_version=manifest.base_version,
                    first_chunk=lowest,
                    num_chunks=max(missing) - lowest + 1,
                    part=part,
                )
            )
            try:
                await _receive_chunks(client, wanted, missing, stall_s)
            except TimeoutError as error:
                stalls = 0 if len(missing) < asked else stalls + 1
                if stalls == max_stalls:
                    raise FetchError(
                        f"version {manifest.policy_version}: chunk {min(missing)} did not come in {stalls} requests"
                    ) from error
                log.warning("weight_fetch_stalled", policy_version=manifest.policy_version, missing=len(missing))


@dataclass(frozen=True)
class _Wanted:
    manifest: Manifest
    place: ChunkSink
    num_bytes: int
    part: int

    def has(self, chunk: WeightChunk) -> bool:
        """Whether a chunk is of this: others are answers to older requests."""
        return (chunk.policy_version, chunk.base_version, chunk.part) == (
            self.manifest.policy_version, self.manifest.base_version, self.part
        )  # fmt: skip


async def _receive_chunks(client: PeerClient, wanted: _Wanted, missing: set[int], stall_s: float) -> None:
    """Put chunks in their places until none is missing. Raises: TimeoutError after a silence; FetchError."""
    manifest = wanted.manifest
    while missing:
        async with asyncio.timeout(stall_s):
            delivered = await client.inbox.get()
        message = delivered.message
        if isinstance(message, WeightGone) and message.policy_version == manifest.policy_version:
            raise GoneError(manifest.policy_version, message.newest_version)
        if not isinstance(message, WeightChunk) or not wanted.has(message):
            continue
        if message.chunk not in missing:
            continue  # sent twice
        begin = message.chunk * manifest.chunk_bytes
        end = min(begin + manifest.chunk_bytes, wanted.num_bytes)
        body = delivered.arrays["data"]
        if body.shape != (end - begin,):
            raise FetchError(f"chunk {message.chunk} has shape {body.shape}, expected ({end - begin},)")
        wanted.place.put(begin, body.data)
        missing.discard(message.chunk)

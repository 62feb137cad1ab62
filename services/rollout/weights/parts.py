"""Fetch the parts of a version from the ranks of the learner that have them, side by side.

Rank 0 passes on what does not come from another rank: a rollout outside of the cluster may reach rank 0 alone.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import accumulate
from typing import Final

import structlog

from gspo_protocol.messages import Manifest, WeightPart
from gspo_services.rollout.weights.chunks import ChunkSink, FetchError, GoneError, fetch_chunks
from gspo_services.shared.net import KeyFileError, PeerClient
from gspo_services.shared.runtime.clock import Clock
from gspo_services.shared.runtime.errors import EndpointError, ServiceError, flatten

log = structlog.get_logger()

CONNECT_S: Final = 3.0
STALL_S: Final = 3.0
TRY_AGAIN_S: Final = 300.0
"""A rank that could not be reached is not tried for so long: rank 0 passes its parts on."""


class RankConnections:
    """The learner's other ranks, as this rollout reaches them."""

    def __init__(
        self, connected: Callable[[str], AbstractAsyncContextManager[PeerClient]], clock: Clock, *, stall_s: float = STALL_S
    ) -> None:
        """``connected`` opens a connection to the weight server at an address."""
        self._connected = connected
        self._clock = clock
        self._stall_s = stall_s
        self._silent: dict[str, float] = {}
        """When each address was last tried in vain."""

    async def fetch(self, manifest: Manifest, part: WeightPart, place: ChunkSink) -> bool:
        """Put the bytes of a part into ``place``; False: its rank cannot be reached. Raises: GoneError."""
        if not part.endpoint or self._clock.now() - self._silent.get(part.endpoint, -TRY_AGAIN_S) < TRY_AGAIN_S:
            return False
        gone: list[BaseException] = []
        reasons: list[str] = []
        try:
            async with self._connected(part.endpoint) as client:
                async with asyncio.timeout(CONNECT_S):
                    await client.connected_welcome()
                await fetch_chunks(client, manifest, place, self._stall_s, max_stalls=1, num_bytes=part.num_bytes)
        except* GoneError as group:
            gone = list(flatten(group))
        except* (FetchError, EndpointError, KeyFileError, ServiceError, TimeoutError) as group:
            reasons = [str(error) or "no handshake" for error in flatten(group)]
        if gone:
            raise gone[0]
        if not reasons:
            return True
        log.warning("rank_not_reached", rank=part.endpoint, policy_version=manifest.policy_version, error=reasons)
        self._silent = {**dict(list(self._silent.items())[-1024:]), part.endpoint: self._clock.now()}
        return False


async def fetch_parts(
    client: PeerClient, manifest: Manifest, place: ChunkSink, stall_s: float, ranks: RankConnections | None
) -> None:
    """Put all bytes of ``manifest``, unchecked, into ``place``. ``client``: connected to whoever sent the manifest.

    Raises: FetchError; GoneError, its subclass.
    """
    if not manifest.parts:
        await fetch_chunks(client, manifest, place, stall_s)
        return
    places = [PartPlace(manifest, number, place) for number in range(len(manifest.parts))]
    left: list[int] = []

    async def from_its_rank(number: int, ranks: RankConnections) -> None:
        if not await ranks.fetch(manifest, manifest.parts[number], places[number]):
            left.append(number)

    async def from_here(number: int) -> None:
        part = manifest.parts[number]
        await fetch_chunks(client, manifest, places[number], stall_s, num_bytes=part.num_bytes, part=number)

    errors: list[BaseException] = []
    try:
        async with asyncio.TaskGroup() as tasks:
            for number in range(1, len(manifest.parts)):
                if ranks is None:
                    left.append(number)
                else:
                    tasks.create_task(from_its_rank(number, ranks), name=f"part-{number}")
            await from_here(0)
    except* FetchError as group:
        errors += flatten(group)
    if errors:
        # One is enough to say why: a missing version before a silence.
        raise min(errors, key=lambda error: not isinstance(error, GoneError))
    for number in sorted(left):
        await from_here(number)


class PartPlace:
    """Where the bytes of one part go: ranges of a snapshot, or a run of a delta."""

    def __init__(self, manifest: Manifest, number: int, place: ChunkSink) -> None:
        part = manifest.parts[number]
        begin = sum(each.num_bytes for each in manifest.parts[:number])
        spans = part.spans if manifest.kind == "snapshot" else [(begin, part.num_bytes)]
        self._offsets = [offset for offset, _ in spans]
        self._starts = list(accumulate((length for _, length in spans), initial=0))
        self._place = place

    def put(self, begin: int, data: memoryview) -> None:
        """Put bytes of the part from ``begin`` on."""
        at = bisect_right(self._starts, begin) - 1
        while len(data):
            inside = begin - self._starts[at]
            piece = data[: self._starts[at + 1] - begin]
            self._place.put(self._offsets[at] + inside, piece)
            begin, data, at = begin + len(piece), data[len(piece) :], at + 1


def check_parts(manifest: Manifest) -> None:
    """Check that parts are all bytes of a manifest, and each byte once. Raises: FetchError."""
    parts = manifest.parts
    if not parts:
        return
    found = sum(part.num_bytes for part in parts)
    if found != manifest.num_bytes:
        raise FetchError(f"manifest: parts have {found} bytes, num_bytes is {manifest.num_bytes}")
    if parts[0].endpoint:
        raise FetchError(f"manifest: its first part is at {parts[0].endpoint}, and not where the manifest came from")
    if manifest.kind == "snapshot":
        _check_spans(manifest, parts)


def _check_spans(manifest: Manifest, parts: Sequence[WeightPart]) -> None:
    for number, part in enumerate(parts):
        found = sum(length for _, length in part.spans)
        if found != part.num_bytes:
            raise FetchError(f"manifest: the spans of part {number} have {found} bytes, its num_bytes is {part.num_bytes}")
    end = 0
    for begin, length in sorted(span for part in parts for span in part.spans if span[1]):
        if begin != end:
            raise FetchError(f"manifest: parts have bytes {min(begin, end)} to {max(begin, end)} not at all, or twice")
        end = begin + length
    if end != manifest.num_bytes:
        raise FetchError(f"manifest: the spans of its parts end at {end}, num_bytes is {manifest.num_bytes}")

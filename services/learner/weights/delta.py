"""A version as its changes against the one before it, in bytes that rollouts fetch like a snapshot's."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from gspo_protocol.deltas import Region, Values, encode_head, encode_region, region_elements, regions
from gspo_protocol.digests import bytes_digest
from gspo_protocol.limits import MAX_DELTA_BUCKETS
from gspo_protocol.messages import DeltaBucket, Manifest, TensorInfo
from gspo_services.learner.weights.snapshot import CHUNK_BYTES, Delta, Snapshot
from gspo_services.shared.weights import compress

WORTHWHILE: Final = 0.75
"""A delta with a larger share of the snapshot's bytes is not made: applying it costs more than it saves."""
SAMPLE_PIECES: Final = 16
SAMPLE_ELEMENTS: Final = 16 * 1024
"""The size of the sample that is encoded first, to see whether the rest is worth it."""
_Encoded = tuple[DeltaBucket, bytes, bytes]


class ComparedRegion(NamedTuple):
    """A region, and its elements in both versions: unsigned [region.num_elements]."""

    region: Region
    before: Values
    after: Values


def encode_delta(base: Snapshot, snapshot: Snapshot) -> Delta | None:
    """Encode the changes from ``base`` to ``snapshot``; None when more than values differ, or a delta would not pay off.

    Uses all cores. Apart from the two snapshots it takes the memory of the delta and of one bucket's changes per core.
    """
    before, after = base.manifest.tensors, snapshot.manifest.tensors
    if [_layout(tensor) for tensor in before] != [_layout(tensor) for tensor in after] or base.begins != snapshot.begins:
        return None
    changed = [index for index, tensor in enumerate(after) if tensor.digest != before[index].digest]
    places = list(_places(base, snapshot, changed))
    encoded = _encode(places, snapshot.manifest.num_bytes)
    if encoded is None or len(encoded) > MAX_DELTA_BUCKETS:
        return None
    head = encode_head(after, changed, [digest for _, digest, _ in encoded])
    data = b"".join([head, *(body for _, _, body in encoded)])
    manifest = Manifest(
        policy_version=snapshot.policy_version,
        kind="delta",
        base_version=base.policy_version,
        num_bytes=len(data),
        chunk_bytes=CHUNK_BYTES,
        digest=snapshot.manifest.digest,
        tensors=[],
        buckets=[bucket for bucket, _, _ in encoded],
        head_digest=bytes_digest(head),
    )
    return Delta(manifest=manifest, data=np.frombuffer(data, dtype=np.uint8))


def _layout(tensor: TensorInfo) -> tuple[str, str, tuple[int, ...], int]:
    return tensor.name, tensor.dtype, tuple(tensor.shape), tensor.offset


def _places(base: Snapshot, snapshot: Snapshot, changed: Sequence[int]) -> Iterator[ComparedRegion]:
    """Regions with changed tensors, each within one piece, and where its elements are."""
    tensors, rest = snapshot.manifest.tensors, list(reversed(changed))
    for begin, before, after in zip(snapshot.begins, base.pieces, snapshot.pieces, strict=True):
        own: list[int] = []
        while rest and tensors[rest[-1]].offset + tensors[rest[-1]].num_bytes <= begin + after.data.nbytes:
            own.append(rest.pop())
        for region in regions(tensors, own):
            yield ComparedRegion(region, *(region_elements(each.data, region, begin) for each in (before, after)))


def _encode(places: list[ComparedRegion], num_bytes: int) -> list[_Encoded] | None:
    """Buckets with the digests of their changes and their compressed bytes, in order; None when they would be too large."""
    most = WORTHWHILE * num_bytes
    # A float32 model changes everywhere: a sample shows that without encoding all of it.
    if _estimate(places) > most:
        return None
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        found = [bucket for bucket in pool.map(_encode_one, places) if bucket is not None]
    return found if sum(len(body) for _, _, body in found) <= most else None


def samples(places: list[ComparedRegion]) -> list[tuple[ComparedRegion, list[ComparedRegion]]]:
    """Some of the places, each with pieces of it, spread evenly: about SAMPLE_PIECES of at most SAMPLE_ELEMENTS elements."""
    chosen = places[:: max(1, len(places) // SAMPLE_PIECES)]
    return [(place, _pieces(place, -(-SAMPLE_PIECES // len(chosen)))) for place in chosen]


def _pieces(place: ComparedRegion, number: int) -> list[ComparedRegion]:
    region = place.region
    num_elements = min(SAMPLE_ELEMENTS, region.num_elements)
    left_out = region.num_elements - num_elements
    found: list[ComparedRegion] = []
    for start in (piece * left_out // number for piece in range(number)):
        part = replace(region, offset=region.offset + start * region.item_bytes, num_elements=num_elements)
        found.append(ComparedRegion(part, *(each[start : start + num_elements] for each in (place.before, place.after))))
    return found


def _estimate(places: list[ComparedRegion]) -> float:
    """The encoded size of all places in bytes, estimated from pieces of some of them."""
    seen, encoded = 0, 0.0
    for place, pieces in samples(places):
        buckets = [_encode_one(piece) for piece in pieces]
        taken = sum(len(bucket[2]) for bucket in buckets if bucket is not None)
        encoded += place.after.nbytes * taken / sum(piece.after.nbytes for piece in pieces)
        seen += place.after.nbytes
    return encoded * sum(place.after.nbytes for place in places) / max(1, seen)


def _encode_one(place: ComparedRegion) -> _Encoded | None:
    changes = encode_region(place.before, place.after, place.region)
    if changes is None:
        return None
    streams = [compress(stream.data) for stream in changes.streams]
    bucket = DeltaBucket(
        place.region.offset,
        place.region.num_elements,
        place.region.item_bytes,  # type: ignore[arg-type]
        changes.num_changed,
        changes.num_absolute,
        changes.streams[0].nbytes,
        [len(stream) for stream in streams],
    )
    return bucket, changes.digest, b"".join(streams)

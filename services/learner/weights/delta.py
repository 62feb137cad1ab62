"""A version as its changes against the one before it, in bytes that rollouts fetch like a snapshot's."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np

from gspo_protocol.deltas import Region, encode_head, encode_region, regions
from gspo_protocol.digests import head_digest
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


def encode_delta(base: Snapshot, snapshot: Snapshot) -> Delta | None:
    """Encode the changes from ``base`` to ``snapshot``; None when more than values differ, or a delta would not pay off.

    Uses all cores. Apart from the two snapshots it takes the memory of the delta and of one bucket's changes per core.
    """
    before, after = base.manifest.tensors, snapshot.manifest.tensors
    if [_layout(tensor) for tensor in before] != [_layout(tensor) for tensor in after]:
        return None
    changed = [index for index, tensor in enumerate(after) if tensor.digest != before[index].digest]
    places = list(regions(after, changed))
    encoded = _encode(base, snapshot, places)
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
        head_digest=head_digest(head),
    )
    return Delta(manifest=manifest, data=np.frombuffer(data, dtype=np.uint8))


def _layout(tensor: TensorInfo) -> tuple[str, str, tuple[int, ...], int]:
    return tensor.name, tensor.dtype, tuple(tensor.shape), tensor.offset


def _encode(base: Snapshot, snapshot: Snapshot, places: list[Region]) -> list[_Encoded] | None:
    """Buckets with the digests of their changes and their compressed bytes, in order; None when they would be too large."""
    most = WORTHWHILE * snapshot.manifest.num_bytes
    # A float32 model changes everywhere: a sample shows that without encoding all of it.
    if _estimate(base, snapshot, places) > most:
        return None
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        found = [bucket for bucket in pool.map(partial(_encode_one, base, snapshot), places) if bucket is not None]
    return found if sum(len(body) for _, _, body in found) <= most else None


def samples(places: list[Region]) -> list[tuple[Region, list[Region]]]:
    """Some of the places, each with pieces of it, spread evenly: about SAMPLE_PIECES of at most SAMPLE_ELEMENTS elements."""
    chosen = places[:: max(1, len(places) // SAMPLE_PIECES)]
    return [(place, _pieces(place, -(-SAMPLE_PIECES // len(chosen)))) for place in chosen]


def _pieces(place: Region, number: int) -> list[Region]:
    num_elements = min(SAMPLE_ELEMENTS, place.num_elements)
    left_out = place.num_elements - num_elements
    starts = (piece * left_out // number for piece in range(number))
    return [replace(place, offset=place.offset + start * place.item_bytes, num_elements=num_elements) for start in starts]


def _estimate(base: Snapshot, snapshot: Snapshot, places: list[Region]) -> float:
    """The encoded size of all places in bytes, estimated from pieces of some of them."""
    seen, encoded = 0, 0.0
    for place, pieces in samples(places):
        buckets = [_encode_one(base, snapshot, piece) for piece in pieces]
        taken = sum(len(bucket[2]) for bucket in buckets if bucket is not None)
        encoded += _region_bytes(place) * taken / sum(map(_region_bytes, pieces))
        seen += _region_bytes(place)
    return encoded * sum(map(_region_bytes, places)) / max(1, seen)


def _encode_one(base: Snapshot, snapshot: Snapshot, place: Region) -> _Encoded | None:
    changes = encode_region(base.data, snapshot.data, place)
    if changes is None:
        return None
    streams = [compress(stream.data) for stream in changes.streams]
    bucket = DeltaBucket(
        place.offset,
        place.num_elements,
        place.item_bytes,  # type: ignore[arg-type]
        changes.num_changed,
        changes.num_absolute,
        changes.streams[0].nbytes,
        [len(stream) for stream in streams],
    )
    return bucket, changes.digest, b"".join(streams)


def _region_bytes(place: Region) -> int:
    return place.num_elements * place.item_bytes

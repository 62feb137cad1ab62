"""A version as the changes against the one before it, in bytes that rollouts fetch like a snapshot's."""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np

from protocol.deltas import Region, encode_digests, encode_region, regions
from protocol.limits import MAX_DELTA_BUCKETS
from protocol.messages import DeltaBucket, Manifest, TensorInfo
from services.learner.snapshot import CHUNK_BYTES, Delta, Snapshot
from services.runtime.compression import compress

WORTHWHILE: Final = 0.75
"""A delta with a larger share of the snapshot's bytes is not made: applying it costs more than it saves."""
SAMPLE_REGIONS: Final = 16


def encode_delta(base: Snapshot, snapshot: Snapshot) -> Delta | None:
    """The changes from ``base`` to ``snapshot``; None when their tensors differ in more than values, or it would not pay.

    Uses all cores, and beside the two snapshots the memory of the delta and of one bucket's changes for each core.
    """
    before, after = base.manifest.tensors, snapshot.manifest.tensors
    if [_layout(tensor) for tensor in before] != [_layout(tensor) for tensor in after]:
        return None
    changed = [index for index, tensor in enumerate(after) if tensor.digest != before[index].digest]
    places = list(regions(after, changed))
    encoded = _encode(base, snapshot, places)
    if encoded is None or len(encoded) > MAX_DELTA_BUCKETS:
        return None
    data = b"".join([encode_digests(after, changed), *(body for _, body in encoded)])
    manifest = Manifest(
        policy_version=snapshot.policy_version,
        kind="delta",
        base_version=base.policy_version,
        num_bytes=len(data),
        chunk_bytes=CHUNK_BYTES,
        digest=snapshot.manifest.digest,
        tensors=[],
        buckets=[bucket for bucket, _ in encoded],
    )
    return Delta(manifest=manifest, data=np.frombuffer(data, dtype=np.uint8))


def _layout(tensor: TensorInfo) -> tuple[str, str, tuple[int, ...], int]:
    return tensor.name, tensor.dtype, tuple(tensor.shape), tensor.offset


def _encode(base: Snapshot, snapshot: Snapshot, places: list[Region]) -> list[tuple[DeltaBucket, bytes]] | None:
    """Buckets with their compressed bytes, in order; None when they would be too large: a sample of them is made first."""

    def encode(place: Region) -> tuple[DeltaBucket, bytes] | None:
        return _encode_one(base, snapshot, place)

    # A float32 model changes everywhere; the whole of it is not encoded to find that out.
    step = max(1, len(places) // SAMPLE_REGIONS)
    sample = range(0, len(places), step)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        found = dict(zip(sample, pool.map(encode, (places[index] for index in sample)), strict=True))
        share = sum(_region_bytes(place) for place in places) / max(1, sum(_region_bytes(places[at]) for at in sample))
        if share * _num_bytes(found.values()) > WORTHWHILE * snapshot.manifest.num_bytes:
            return None
        others = [index for index in range(len(places)) if index not in found]
        found.update(zip(others, pool.map(encode, (places[index] for index in others)), strict=True))
    if _num_bytes(found.values()) > WORTHWHILE * snapshot.manifest.num_bytes:
        return None
    ordered = (found[index] for index in range(len(places)))
    return [bucket for bucket in ordered if bucket is not None]


def _encode_one(base: Snapshot, snapshot: Snapshot, place: Region) -> tuple[DeltaBucket, bytes] | None:
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
    return bucket, b"".join(streams)


def _region_bytes(place: Region) -> int:
    return place.num_elements * place.item_bytes


def _num_bytes(encoded: Iterable[tuple[DeltaBucket, bytes] | None]) -> int:
    return sum(len(bucket[1]) for bucket in encoded if bucket is not None)

"""A version as its changes against the one before it, in bytes that rollouts fetch like a snapshot's."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
from msgspec import structs

from gspo_protocol.deltas import ITEM_BYTES, Places, Region, Values, encode_head, encode_region, region_elements, regions
from gspo_protocol.digests import bytes_digest
from gspo_protocol.limits import MAX_DELTA_BUCKETS
from gspo_protocol.messages import DeltaBucket, Manifest, WeightPart
from gspo_services.learner.weights.snapshot import CHUNK_BYTES, Delta, Snapshot
from gspo_services.learner.weights.version_layout import VersionLayout
from gspo_services.learner.weights.weight_copy import CopiedRange, WeightCopy
from gspo_services.shared.weights import compress

WORTHWHILE: Final = 0.75
"""A delta with a larger share of the snapshot's bytes is not made: applying it costs more than it saves."""
SAMPLE_PIECES: Final = 16
SAMPLE_ELEMENTS: Final = 16 * 1024
"""The size of the sample that is encoded first, to see whether the rest is worth it."""


class EncodedBucket(NamedTuple):
    """``bucket``, the digest of its changes, and its compressed streams."""

    bucket: DeltaBucket
    digest: bytes
    body: bytes


class ComparedRegion(NamedTuple):
    """A region, and its elements in both versions: unsigned [region.num_elements]."""

    region: Region
    before: Values
    after: Values


def encode_delta(base: Snapshot, snapshot: Snapshot) -> Delta | None:
    """Encode the changes from ``base`` to ``snapshot``, both whole; None when more than values differ, or a delta would not
    pay off.
    """
    encoded = encode_changes(base.weights, snapshot.weights)
    return None if encoded is None else made_delta(base, snapshot, encoded, encoded)


def encode_changes(base: WeightCopy, weights: WeightCopy) -> list[EncodedBucket] | None:
    """Encode what has changed in this rank's part of two versions; None when more than values differ, or it would not pay
    off.

    Uses all cores. Apart from the two copies it takes the memory of the result and of one bucket's changes per core.
    """
    places = [(piece.begin, piece.end) for piece in weights.pieces]
    if base.layout != weights.layout or [(piece.begin, piece.end) for piece in base.pieces] != places:
        return None
    return _encode(list(_places(base, weights)), sum(end - begin for begin, end in places))


def made_delta(
    base: Snapshot,
    snapshot: Snapshot,
    buckets: Sequence[EncodedBucket],
    own: Sequence[EncodedBucket],
    parts: Sequence[WeightPart] = (),
) -> Delta | None:
    """Make the delta between two versions from the ``buckets`` of all ranks, of which the first are this one's ``own``; None
    when they are too many. ``parts``: see ``Manifest``, the first without the head, which is added to it."""
    if len(buckets) > MAX_DELTA_BUCKETS:
        return None
    before, after = base.manifest.tensors, snapshot.manifest.tensors
    changed = [index for index, tensor in enumerate(after) if tensor.digest != before[index].digest]
    head = encode_head(after, changed, [each.digest for each in buckets])
    data = b"".join([head, *(each.body for each in own)])
    sizes = [len(head), *(sum(each.bucket.stream_bytes) for each in buckets)]
    first = [structs.replace(each, num_bytes=each.num_bytes + len(head)) for each in parts[:1]]
    manifest = Manifest(
        policy_version=snapshot.policy_version,
        kind="delta",
        base_version=base.policy_version,
        num_bytes=sum(sizes),
        chunk_bytes=CHUNK_BYTES,
        digest=snapshot.manifest.digest,
        tensors=[],
        buckets=[each.bucket for each in buckets],
        head_digest=bytes_digest(head),
        parts=[*first, *parts[1:]],
        probe=snapshot.manifest.probe,
    )
    return Delta(manifest=manifest, data=np.frombuffer(data, dtype=np.uint8))


def _places(base: WeightCopy, weights: WeightCopy) -> Iterator[ComparedRegion]:
    """Regions with changed tensors, each within one piece, and where its elements are."""
    layout = weights.layout
    for before, after, was, now in zip(base.pieces, weights.pieces, base.sums(), weights.sums(), strict=True):
        changed = np.flatnonzero(was != now)
        if not len(changed):
            continue
        first, _ = layout.row(after.begin, after.end)
        for region in regions(_runs(layout, after, changed + first)):
            yield ComparedRegion(region, *(region_elements(each.data, region, after.begin) for each in (before, after)))


def _runs(layout: VersionLayout, piece: CopiedRange, changed: Places) -> Iterator[tuple[int, int, int]]:
    """Bytes of tensors with changed tiles, which are places in the row, in ascending order."""
    for touched in layout.touched(piece.begin, piece.end):
        first, last = layout.place(touched)
        at = int(np.searchsorted(changed, first))
        if at < len(changed) and changed[at] < last:
            yield touched.begin, touched.end, ITEM_BYTES[layout.tensors[touched.tensor].dtype]


def _encode(places: list[ComparedRegion], num_bytes: int) -> list[EncodedBucket] | None:
    """Buckets in order; None when they would be too large."""
    most = WORTHWHILE * num_bytes
    # A float32 model changes everywhere: a sample shows that without encoding all of it.
    if _estimate(places) > most:
        return None
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        found = [bucket for bucket in pool.map(_encode_one, places) if bucket is not None]
    return found if sum(len(each.body) for each in found) <= most else None


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
        taken = sum(len(bucket.body) for bucket in buckets if bucket is not None)
        encoded += place.after.nbytes * taken / sum(piece.after.nbytes for piece in pieces)
        seen += place.after.nbytes
    return encoded * sum(place.after.nbytes for place in places) / max(1, seen)


def _encode_one(place: ComparedRegion) -> EncodedBucket | None:
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
    return EncodedBucket(bucket, changes.digest, b"".join(streams))

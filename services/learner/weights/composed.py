"""One version from the parts of all ranks: digests from their sums, a manifest that names who has what."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gspo_protocol.messages import PartReady, WeightPart
from gspo_protocol.tiles import Sums
from gspo_services.learner.weights.delta import EncodedBucket, made_delta
from gspo_services.learner.weights.snapshot import Delta, Snapshot, made_snapshot
from gspo_services.learner.weights.version_layout import VersionLayout
from gspo_services.learner.weights.weight_copy import WeightCopy
from gspo_services.shared.net import Delivered
from gspo_services.shared.runtime.errors import ServiceError

Span = tuple[int, int]
"""Offset and length of a range of a version."""


def composed(
    policy_version: int,
    weights: WeightCopy,
    base: Snapshot | None,
    buckets: list[EncodedBucket] | None,
    others: Sequence[Delivered],
    endpoints: Sequence[str],
) -> tuple[Snapshot, Delta | None]:
    """Return a version, and its delta against ``base``; None: there is none.

    ``weights``, ``buckets``: rank 0's own part, and its changes. ``others``: the PartReady of each other rank, in order,
    which serves its part at the endpoint of the same place.
    Raises: ServiceError when the parts do not make one version.
    """
    own = [(piece.begin, len(piece.data)) for piece in weights.pieces]
    spans = [own, *(_spans(each) for each in others)]
    _require_whole(weights.layout, spans)
    row = weights.row()
    for rank, (each, theirs) in enumerate(zip(others, spans[1:], strict=True), start=1):
        _add(row, weights.layout, each, theirs, rank)
    snapshot = made_snapshot(policy_version, weights, row, _parts(spans, endpoints) if others else ())
    if base is None or buckets is None or any(_ready(each).base_version != base.policy_version for each in others):
        return snapshot, None
    every, parts = list(buckets), [WeightPart(_size(buckets))]
    for each, endpoint in zip(others, endpoints, strict=True):
        theirs_now = _buckets(each)
        every += theirs_now
        parts.append(WeightPart(_size(theirs_now), endpoint))
    delta = made_delta(base, snapshot, every, buckets, parts if others else ())
    return snapshot, delta


def _ready(delivered: Delivered) -> PartReady:
    assert isinstance(delivered.message, PartReady)
    return delivered.message


def _spans(delivered: Delivered) -> list[Span]:
    return [(begin, length) for begin, length in delivered.arrays["spans"].reshape(-1, 2).tolist()]


def _parts(spans: Sequence[Sequence[Span]], endpoints: Sequence[str]) -> list[WeightPart]:
    return [
        WeightPart(sum(length for _, length in each), endpoint, list(each))
        for each, endpoint in zip(spans, ["", *endpoints], strict=True)
    ]


def _require_whole(layout: VersionLayout, spans: Sequence[Sequence[Span]]) -> None:
    """Raises: ServiceError when the ranks have not all of the version, or some of it twice."""
    end = 0
    for begin, length, rank in sorted((*span, rank) for rank, each in enumerate(spans) for span in each):
        if begin != end:
            what = "twice" if begin < end else "nowhere"
            raise ServiceError(
                f"the ranks do not make one version: bytes {min(begin, end)} to {max(begin, end)} are {what} (rank {rank} "
                f"has {length} from {begin} on); the ranks run different models or releases"
            )
        end = begin + length
    if end != layout.num_bytes:
        raise ServiceError(f"the ranks have {end} bytes of a version of {layout.num_bytes}: they run different models")


def _add(row: Sums, layout: VersionLayout, delivered: Delivered, spans: Sequence[Span], rank: int) -> None:
    """Add a rank's sums. Raises: ServiceError when they are not those of its spans."""
    sums, at = delivered.arrays["sums"].view(np.uint64), 0
    for begin, length in spans:
        first, last = layout.row(begin, begin + length)
        if at + last - first > len(sums):
            break
        row[first:last] += sums[at : at + last - first]
        at += last - first
    else:
        if at == len(sums):
            return
    raise ServiceError(f"rank {rank} has sent {len(sums)} sums, which are not those of its part: it runs another release")


def _buckets(delivered: Delivered) -> list[EncodedBucket]:
    digests = delivered.arrays["digests"]
    return [
        EncodedBucket(bucket, digest.tobytes(), b"")
        for bucket, digest in zip(_ready(delivered).buckets, digests, strict=True)
    ]


def _size(buckets: Sequence[EncodedBucket]) -> int:
    return sum(sum(each.bucket.stream_bytes) for each in buckets)

"""Lossless weight deltas: which elements of a version differ from its base, and what they are now. Pure, numpy only.

The bytes of both versions are cut into buckets of at most MAX_DELTA_BUCKET_ELEMENTS elements of one size, across the borders
of tensors, so that small tensors share one. A bucket is written as byte streams:

    gaps       between the changed elements, in ascending order: how many unchanged ones precede each, as bytes that are
               added up; 255 says that another byte follows
    residues   one byte for each change: the new value, read as an unsigned integer, modulo 8. It stands for the integer with
               that residue within -4 .. +3 of the old one: a change of one step of the floating-point type is +-1. 8: the
               new value is further away
    absolute   the values that are further away, rotated left by one bit, which puts the exponent of a bfloat16 or float32
               into a stream of its own: 2 or 4 byte planes, low byte first; none where there is no such value

Each bucket has a digest of its changes: of the gaps, of the old values and of the new ones. So a receiver that holds the
base knows from the changed elements alone that they were what they should have been, and are what they should be.

Applying a delta twice is harmless: an element that already has its new value is itself the nearest with its residue. At
small learning rates nearly all changes are residues, which compress to fewer bits than values do. Streams differ in entropy,
so each is compressed by itself (gspo_services.shared.weights.compression), in this order.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from gspo_protocol.limits import MAX_DELTA_BUCKET_ELEMENTS
from gspo_protocol.messages.weights import DeltaBucket, TensorInfo

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Values = np.ndarray[Any, Any]
"""Elements as unsigned integers of their size."""
Places = np.ndarray[Any, np.dtype[np.integer[Any]]]
ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
TENSOR_DIGEST_BYTES: Final = 32
CHANGES_DIGEST_BYTES: Final = 16
_UNSIGNED: Final[dict[int, np.dtype[Any]]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_MORE: Final = 255
_COMPARED: Final = 256 * 1024
"""So many elements are compared at a time."""
_MANY_WIDE: Final = 1 / 8
_RESIDUES: Final = 8
_BEHIND: Final = 4
"""Residues name values from this many steps behind the old one."""
_ABSOLUTE: Final = _RESIDUES


@dataclass(frozen=True, kw_only=True)
class Region:
    """A bucket's place: ``num_elements`` elements of ``item_bytes`` bytes each, from byte ``offset`` of the version."""

    offset: int
    num_elements: int
    item_bytes: int


@dataclass(frozen=True, kw_only=True)
class Changes:
    """The changes of one region, uncompressed. ``streams``: uint8 [any] each, in the order of the module's docstring.

    ``digest``: of the changes, with CHANGES_DIGEST_BYTES.
    """

    region: Region
    num_changed: int
    num_absolute: int
    streams: list[Bytes]
    digest: bytes

    @property
    def num_bytes(self) -> int:
        return sum(stream.nbytes for stream in self.streams)


def regions(runs: Iterable[tuple[int, int, int]]) -> Iterator[Region]:
    """Cut runs of bytes into regions. A run: its first byte in the version, the one after its last, the bytes of an element.
    Runs that follow each other, with elements of one size, are one."""
    joined: list[tuple[int, int, int]] = []
    for begin, end, size in runs:
        if joined and joined[-1][1] == begin and joined[-1][2] == size:
            joined[-1] = (joined[-1][0], end, size)
        elif begin < end:
            joined.append((begin, end, size))
    for begin, end, size in joined:
        step = MAX_DELTA_BUCKET_ELEMENTS * size
        for offset in range(begin, end, step):
            yield Region(offset=offset, num_elements=(min(offset + step, end) - offset) // size, item_bytes=size)


def encode_region(before: Values, after: Values, region: Region) -> Changes | None:
    """Encode the changes of ``region``; None where there are none. Its elements in the two versions: unsigned [as many]."""
    positions, was, now = _changed(before, after)
    if not len(positions):
        return None
    # Unsigned, so that it wraps around: -4 .. 3 become 0 .. 7.
    near = (now - was + was.dtype.type(_BEHIND)) < _RESIDUES
    residues = np.where(near, now % _RESIDUES, _ABSOLUTE).astype(np.uint8)
    far = now[~near]
    streams = [_encode_gaps(positions), residues]
    if len(far):
        streams += _planes(_rotated(far, 1))
    digest = changes_digest(streams[0].data, was, now)
    return Changes(region=region, num_changed=len(positions), num_absolute=len(far), streams=streams, digest=digest)


def _changed(before: Values, after: Values) -> tuple[Places, Values, Values]:
    """Positions of changed elements, and their values in the two versions. What was compared is still in a core's cache
    when it is read."""
    differs = np.empty(_COMPARED, dtype=bool)
    positions, was, now = list[Places](), list[Values](), list[Values]()
    for begin in range(0, len(before), _COMPARED):
        old, new = (each[begin : begin + _COMPARED] for each in (before, after))
        found = np.flatnonzero(np.not_equal(old, new, out=differs[: len(old)]))
        was.append(old[found])
        now.append(new[found])
        positions.append(found + begin)
    return np.concatenate(positions), np.concatenate(was), np.concatenate(now)


def changes_digest(gaps: bytes | memoryview, was: Values, now: Values) -> bytes:
    """Digest of a bucket's changes. ``gaps``: its first stream; ``was`` and ``now``: unsigned [num_changed]."""
    state = hashlib.blake2b(gaps, digest_size=CHANGES_DIGEST_BYTES)
    state.update(was.data)
    state.update(now.data)
    return state.digest()


def stream_lengths(bucket: DeltaBucket) -> list[int]:
    """Bytes of each stream of ``bucket``, uncompressed."""
    planes = [bucket.num_absolute] * bucket.item_bytes if bucket.num_absolute else []
    return [bucket.num_gap_bytes, bucket.num_changed, *planes]


def check_bucket(bucket: DeltaBucket, num_bytes: int) -> None:
    """Check a bucket before its streams are decompressed: no stream may be longer than changes to its part of a version of
    ``num_bytes`` bytes can make it. A few bytes of delta then take at most a small multiple of the version's own memory.

    Raises: ValueError when the bucket is outside of the version, or names more changes than it has elements.
    """
    where = f"bucket at {bucket.offset}"
    if bucket.offset + bucket.num_elements * bucket.item_bytes > num_bytes:
        raise ValueError(
            f"{where}: {bucket.num_elements} elements of {bucket.item_bytes} bytes do not fit into a version of {num_bytes}"
        )
    if not bucket.num_absolute <= bucket.num_changed <= bucket.num_elements:
        raise ValueError(
            f"{where}: {bucket.num_changed} of {bucket.num_elements} elements are said to change, "
            f"{bucket.num_absolute} of them to absolute values"
        )
    longest = bucket.num_changed + bucket.num_elements // _MORE
    if bucket.num_gap_bytes > longest:
        raise ValueError(
            f"{where}: {bucket.num_gap_bytes} bytes of gaps; {bucket.num_changed} changes of {bucket.num_elements} elements "
            f"take {longest} at most"
        )


@dataclass(frozen=True, kw_only=True)
class DecodedChanges:
    """The changes of one bucket: which elements, and how their new values follow from the old ones."""

    region: Region
    positions: Places
    """In ascending order: int64 [num_changed]."""
    _gaps: bytes
    _residues: Bytes
    _absolute: Values

    def new_values(self, was: Values) -> Values:
        """Return the elements' new values. ``was``: their values in the base; unsigned [num_changed], like the result."""
        behind = was.dtype.type(_BEHIND)
        now: Values = was - behind
        now += (self._residues - now) & (_RESIDUES - 1)
        if len(self._absolute):
            now[self._residues >= _ABSOLUTE] = self._absolute
        return now

    def digest(self, was: Values, now: Values) -> bytes:
        """Digest of the changes, to be compared with the learner's."""
        return changes_digest(self._gaps, was, now)


def decode_streams(bucket: DeltaBucket, streams: Sequence[bytes], num_bytes: int) -> DecodedChanges:
    """Read the changes that a bucket's streams make to a version of ``num_bytes`` bytes.

    Raises: ValueError when ``check_bucket`` does, when the streams are not as many or as long as the bucket says, or when a
    position is outside of it.
    """
    check_bucket(bucket, num_bytes)
    where = f"bucket at {bucket.offset}"
    lengths = [len(stream) for stream in streams]
    if lengths != stream_lengths(bucket):
        raise ValueError(f"{where}: its streams have {lengths} bytes, {stream_lengths(bucket)} expected")
    positions = _decode_gaps(where, streams[0], bucket.num_changed)
    if int(positions[-1]) >= bucket.num_elements:
        raise ValueError(f"{where}: position {int(positions[-1])} is outside of its {bucket.num_elements} elements")
    residues = np.frombuffer(streams[1], dtype=np.uint8)
    num_far = int(np.count_nonzero(residues >= _ABSOLUTE))
    if num_far != bucket.num_absolute:
        raise ValueError(f"{where}: {num_far} values are absolute, num_absolute is {bucket.num_absolute}")
    kind = _UNSIGNED[bucket.item_bytes]
    far = _rotated(_joined(streams[2:]), 8 * bucket.item_bytes - 1) if num_far else np.empty(0, dtype=kind)
    region = Region(offset=bucket.offset, num_elements=bucket.num_elements, item_bytes=bucket.item_bytes)
    return DecodedChanges(
        region=region, positions=positions, _gaps=streams[0], _residues=residues.astype(kind), _absolute=far
    )


@dataclass(frozen=True, kw_only=True)
class DeltaHead:
    """What precedes a delta's buckets: digests of the version that it leads to, and of the changes that lead there."""

    tensors: Mapping[int, str]
    """The digest of each tensor that changes, hexadecimal, by its place in the version."""
    buckets: Sequence[bytes]
    """The digest of each bucket's changes."""
    num_bytes: int


def encode_head(tensors: Sequence[TensorInfo], changed: Sequence[int], buckets: Sequence[bytes]) -> bytes:
    """Encode the head of a delta: a bit for each tensor, set for changed ones; their digests now; the digests of the
    buckets.
    """
    bits = np.zeros(len(tensors), dtype=bool)
    bits[list(changed)] = True
    return b"".join([np.packbits(bits).tobytes(), *(bytes.fromhex(tensors[at].digest) for at in changed), *buckets])


def decode_head(payload: memoryview, num_tensors: int, num_buckets: int) -> DeltaHead:
    """Read the head of a delta. Raises: ValueError when the delta is shorter than its head."""
    begin = -(-num_tensors // 8)
    if len(payload) < begin:
        raise ValueError(f"delta has {len(payload)} bytes, the bits of {num_tensors} tensors take {begin}")
    bits = np.unpackbits(np.frombuffer(payload[:begin], dtype=np.uint8), count=num_tensors)
    changed = np.flatnonzero(bits).tolist()
    middle = begin + TENSOR_DIGEST_BYTES * len(changed)
    end = middle + CHANGES_DIGEST_BYTES * num_buckets
    if len(payload) < end:
        raise ValueError(
            f"delta has {len(payload)} bytes, the digests of its {len(changed)} changed tensors and {num_buckets} buckets "
            f"take {end}"
        )
    places = range(begin, middle, TENSOR_DIGEST_BYTES)
    return DeltaHead(
        tensors={index: payload[at : at + TENSOR_DIGEST_BYTES].hex() for index, at in zip(changed, places, strict=True)},
        buckets=[bytes(payload[at : at + CHANGES_DIGEST_BYTES]) for at in range(middle, end, CHANGES_DIGEST_BYTES)],
        num_bytes=end,
    )


def as_elements(data: Bytes, item_bytes: int) -> Values:
    """View bytes as unsigned integers of ``item_bytes`` (2 or 4) each."""
    return data.view(_UNSIGNED[item_bytes])


def region_elements(data: Bytes, region: Region, begin: int = 0) -> Values:
    """View a region's elements: unsigned [num_elements]. ``data``: bytes of the version from byte ``begin`` on."""
    first = region.offset - begin
    return as_elements(data[first : first + region.num_elements * region.item_bytes], region.item_bytes)


def _rotated(values: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    """Rotate each unsigned value left."""
    width = 8 * values.dtype.itemsize
    rotated: np.ndarray[Any, Any] = (values << values.dtype.type(bits)) | (values >> values.dtype.type(width - bits))
    return rotated


def _encode_gaps(positions: np.ndarray[Any, Any]) -> Bytes:
    gaps = np.empty_like(positions)
    gaps[0] = positions[0]
    np.subtract(positions[1:], positions[:-1], out=gaps[1:])
    gaps[1:] -= 1
    # Where much has changed, hardly any gap needs a second byte.
    wide = np.flatnonzero(gaps >= _MORE)
    if len(wide) > _MANY_WIDE * len(gaps):
        ends = np.cumsum(gaps // _MORE + 1) - 1
        stream = np.full(int(ends[-1]) + 1, _MORE, dtype=np.uint8)
        stream[ends] = gaps % _MORE
        return stream
    stream = gaps.astype(np.uint8)
    if len(wide):
        more, rest = np.divmod(gaps[wide], _MORE)
        stream[wide] = rest
        stream = np.insert(stream, np.repeat(wide, more), _MORE)
    return stream


def _decode_gaps(where: str, stream: bytes, num_changed: int) -> np.ndarray[Any, Any]:
    """Positions, int64 [num_changed]. Raises: ValueError when there are not that many."""
    gaps = np.frombuffer(stream, dtype=np.uint8)
    ends = np.flatnonzero(gaps != _MORE)
    if len(ends) != num_changed:
        raise ValueError(f"{where}: {len(ends)} positions, num_changed is {num_changed}")
    return np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(num_changed)


def _planes(values: np.ndarray[Any, Any]) -> list[Bytes]:
    """The bytes of each value, low byte first: a contiguous array for every place."""
    table = values.view(np.uint8).reshape(len(values), values.dtype.itemsize)
    return [np.ascontiguousarray(table[:, place]) for place in range(values.dtype.itemsize)]


def _joined(planes: Sequence[bytes]) -> np.ndarray[Any, Any]:
    """Join the byte ``planes`` into values: unsigned [length of a plane]."""
    table = np.empty((len(planes[0]), len(planes)), dtype=np.uint8)
    for place, plane in enumerate(planes):
        table[:, place] = np.frombuffer(plane, dtype=np.uint8)
    return table.reshape(-1).view(_UNSIGNED[len(planes)])

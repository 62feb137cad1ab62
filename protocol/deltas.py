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

Applying a delta twice is harmless: an element that already has its new value is itself the nearest with its residue. At
small learning rates nearly all changes are residues, which compress to fewer bits than values do. Streams differ in entropy,
so each is compressed by itself (services.weights.compression), in this order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from protocol.limits import MAX_DELTA_BUCKET_ELEMENTS
from protocol.messages.weights import DeltaBucket, TensorInfo

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
DIGEST_BYTES: Final = 16
"""How much of each changed tensor's digest a delta has: enough to name a wrong tensor. Manifest.digest covers all of it."""
_UNSIGNED: Final = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_MORE: Final = 255
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
    """The changes of one region, uncompressed. ``streams``: uint8 [any] each, in the order of the module's docstring."""

    region: Region
    num_changed: int
    num_absolute: int
    streams: list[Bytes]

    @property
    def num_bytes(self) -> int:
        return sum(stream.nbytes for stream in self.streams)


def regions(tensors: Sequence[TensorInfo], changed: Sequence[int]) -> Iterator[Region]:
    """Cut the tensors with these indices (ascending) into regions: adjacent tensors of one element size share one."""
    runs: list[tuple[int, int, int]] = []
    for index in changed:
        tensor = tensors[index]
        size = ITEM_BYTES[tensor.dtype]
        if runs and runs[-1][1] == tensor.offset and runs[-1][2] == size:
            runs[-1] = (runs[-1][0], tensor.offset + tensor.num_bytes, size)
        elif tensor.num_bytes:
            runs.append((tensor.offset, tensor.offset + tensor.num_bytes, size))
    for begin, end, size in runs:
        step = MAX_DELTA_BUCKET_ELEMENTS * size
        for offset in range(begin, end, step):
            yield Region(offset=offset, num_elements=(min(offset + step, end) - offset) // size, item_bytes=size)


def count_changed(old: Bytes, new: Bytes, region: Region) -> int:
    """How many elements of ``region`` differ. ``old`` and ``new``: uint8 [num_bytes of the version]."""
    return int(np.count_nonzero(_elements(old, region) != _elements(new, region)))


def encode_region(old: Bytes, new: Bytes, region: Region) -> Changes | None:
    """The changes of ``region``; None where there are none. ``old`` and ``new``: uint8 [num_bytes of the version]."""
    before, after = _elements(old, region), _elements(new, region)
    positions = np.flatnonzero(before != after)
    if not len(positions):
        return None
    was, now = before[positions], after[positions]
    # Unsigned, so that it wraps around: -4 .. 3 become 0 .. 7.
    near = (now - was + was.dtype.type(_BEHIND)) < _RESIDUES
    residues = np.where(near, now % _RESIDUES, _ABSOLUTE).astype(np.uint8)
    far = now[~near]
    streams = [_encode_gaps(positions), residues]
    if len(far):
        streams += _planes(_rotated(far, 1))
    return Changes(region=region, num_changed=len(positions), num_absolute=len(far), streams=streams)


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


def apply_streams(target: Bytes, bucket: DeltaBucket, streams: Sequence[bytes]) -> None:
    """Write a bucket's values into ``target``, uint8 [num_bytes of the version], writable.

    Raises: ValueError when ``check_bucket`` does, when the streams are not as many or as long as the bucket says, or when a
    position is outside of it. Nothing is written then.
    """
    check_bucket(bucket, target.nbytes)
    where = f"bucket at {bucket.offset}"
    lengths = [len(stream) for stream in streams]
    if lengths != stream_lengths(bucket):
        raise ValueError(f"{where}: its streams have {lengths} bytes, {stream_lengths(bucket)} expected")
    positions = _decode_gaps(where, streams[0], bucket.num_changed)
    if int(positions[-1]) >= bucket.num_elements:
        raise ValueError(f"{where}: position {int(positions[-1])} is outside of its {bucket.num_elements} elements")
    residues = np.frombuffer(streams[1], dtype=np.uint8)
    far = residues >= _ABSOLUTE
    if int(np.count_nonzero(far)) != bucket.num_absolute:
        raise ValueError(f"{where}: {int(np.count_nonzero(far))} values are absolute, num_absolute is {bucket.num_absolute}")
    elements = _elements(
        target, Region(offset=bucket.offset, num_elements=bucket.num_elements, item_bytes=bucket.item_bytes)
    )
    was = elements[positions]
    steps = (residues.astype(was.dtype) - was + was.dtype.type(_BEHIND)) % _RESIDUES
    now = was + steps - was.dtype.type(_BEHIND)
    if bucket.num_absolute:
        now[far] = _rotated(_joined(streams[2:]), 8 * bucket.item_bytes - 1)
    elements[positions] = now


def encode_digests(tensors: Sequence[TensorInfo], changed: Sequence[int]) -> bytes:
    """The head of a delta: a bit for each tensor, set for changed ones, and the first DIGEST_BYTES of their digests now."""
    bits = np.zeros(len(tensors), dtype=bool)
    bits[list(changed)] = True
    digests = b"".join(bytes.fromhex(tensors[index].digest)[:DIGEST_BYTES] for index in changed)
    return np.packbits(bits).tobytes() + digests


def decode_digests(head: memoryview, num_tensors: int) -> tuple[dict[int, bytes], int]:
    """Read the head of a delta: the digest's first bytes by index of the changed tensor, and the head's length.

    Raises: ValueError when the delta is shorter than its head.
    """
    num_bits_bytes = -(-num_tensors // 8)
    if len(head) < num_bits_bytes:
        raise ValueError(f"delta has {len(head)} bytes, the bits of {num_tensors} tensors take {num_bits_bytes}")
    bits = np.unpackbits(np.frombuffer(head[:num_bits_bytes], dtype=np.uint8), count=num_tensors)
    changed = np.flatnonzero(bits).tolist()
    length = num_bits_bytes + DIGEST_BYTES * len(changed)
    if len(head) < length:
        raise ValueError(f"delta has {len(head)} bytes, the digests of its {len(changed)} changed tensors take {length}")
    places = range(num_bits_bytes, length, DIGEST_BYTES)
    return {index: bytes(head[at : at + DIGEST_BYTES]) for index, at in zip(changed, places, strict=True)}, length


def _elements(data: Bytes, region: Region) -> np.ndarray[Any, Any]:
    """A view of a region's elements as unsigned integers: [num_elements]."""
    end = region.offset + region.num_elements * region.item_bytes
    return data[region.offset : end].view(_UNSIGNED[region.item_bytes])


def _rotated(values: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    """Each unsigned value rotated left."""
    width = 8 * values.dtype.itemsize
    rotated: np.ndarray[Any, Any] = (values << values.dtype.type(bits)) | (values >> values.dtype.type(width - bits))
    return rotated


def _encode_gaps(positions: np.ndarray[Any, Any]) -> Bytes:
    gaps = np.diff(positions, prepend=-1) - 1
    ends = np.cumsum(gaps // _MORE + 1) - 1
    stream = np.full(int(ends[-1]) + 1, _MORE, dtype=np.uint8)
    stream[ends] = gaps % _MORE
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
    """The values with their bytes in ``planes``: unsigned [length of a plane]."""
    table = np.empty((len(planes[0]), len(planes)), dtype=np.uint8)
    for place, plane in enumerate(planes):
        table[:, place] = np.frombuffer(plane, dtype=np.uint8)
    return table.reshape(-1).view(_UNSIGNED[len(planes)])

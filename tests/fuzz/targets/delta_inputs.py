"""Consecutive versions of weights, their deltas, and false deltas from a peer that knows the format."""

from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any, Final

import numpy as np
from msgspec import structs

from gspo_protocol.codec import decode
from gspo_protocol.deltas import (
    CHANGES_DIGEST_BYTES,
    ITEM_BYTES,
    Region,
    decode_head,
    decode_streams,
    encode_head,
    encode_region,
    region_elements,
    regions,
    stream_lengths,
)
from gspo_protocol.digests import bytes_digest, tensor_digest, version_digest
from gspo_protocol.errors import ProtocolError
from gspo_protocol.messages import DeltaBucket, Manifest, TensorInfo
from gspo_services.shared.weights.compression import compress, decompress
from tests.fuzz.mutate import mutate_bytes, mutate_frames
from tests.fuzz.targets.wire import MESSAGE_MARK, joined

BASE_VERSION: Final = 3
LAYOUT: Final = (
    ("a", "bfloat16", 5), ("b", "bfloat16", 300), ("none", "float16", 0), ("one", "float32", 1), ("c", "float32", 40),
    ("d", "float16", 64), ("e", "bfloat16", 40),
)  # fmt: skip
"""The check of unchanged tensors after each delta leaves out the last ones."""
STEPS: Final[tuple[dict[int, int], ...]] = ({0: 1, 3: -2, 290: 4000}, {5: 1}, {306: 9, 307: 70_000}, {350: 1, 351: -5}, {})
"""One dictionary for each version after the base: element (450 in all) -> steps of its type that it changes by."""
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


# --- versions ------------------------------------------------------------------------------------------------------------


@cache
def versions() -> list[tuple[Manifest, bytes]]:
    """The base and the versions after it, each as a snapshot's manifest and its bytes."""
    generator = np.random.default_rng(7)
    kinds = {"float32": np.dtype("<u4"), "bfloat16": np.dtype("<u2"), "float16": np.dtype("<u2")}
    values = [generator.integers(0, 2**15, size).astype(kinds[dtype]) for _, dtype, size in LAYOUT]
    made = [_snapshot(BASE_VERSION, values)]
    for number, steps in enumerate(STEPS, start=1):
        for place, step in steps.items():
            at, index = place, 0
            while at >= len(values[index]):
                at, index = at - len(values[index]), index + 1
            values[index][at] = (int(values[index][at]) + step) % 2 ** (8 * values[index].itemsize)
        made.append(_snapshot(BASE_VERSION + number, values))
    return made


def _snapshot(version: int, values: list[np.ndarray[Any, Any]]) -> tuple[Manifest, bytes]:
    tensors: list[TensorInfo] = []
    offset = 0
    for (name, dtype, size), each in zip(LAYOUT, values, strict=True):
        digest = tensor_digest(each.tobytes())
        tensors.append(TensorInfo(name, dtype, [size], offset, each.nbytes, digest))  # type: ignore[arg-type]
        offset += each.nbytes
    manifest = Manifest(
        policy_version=version, kind="snapshot", base_version=0, num_bytes=offset, chunk_bytes=256,
        digest=version_digest(tensors), tensors=tensors,
    )  # fmt: skip
    return manifest, b"".join(each.tobytes() for each in values)


def delta_between(base: tuple[Manifest, bytes], snapshot: tuple[Manifest, bytes]) -> tuple[Manifest, bytes]:
    """The delta that gspo_services.learner.weights.delta makes, without torch."""
    before, after = base[0].tensors, snapshot[0].tensors
    changed = [index for index, tensor in enumerate(after) if tensor.digest != before[index].digest]
    old, new = (np.frombuffer(data, dtype=np.uint8) for _, data in (base, snapshot))
    places = [after[at] for at in changed]
    runs = [(each.offset, each.offset + each.num_bytes, ITEM_BYTES[each.dtype]) for each in places]
    encoded = [_bucket(old, new, region) for region in regions(runs)]
    head = encode_head(after, changed, [digest for _, digest, _ in encoded])
    buckets = [(bucket, body) for bucket, _, body in encoded]
    return _manifest_of(base[0].policy_version, snapshot[0], head, buckets), head + b"".join(body for _, body in buckets)


def _manifest_of(base_version: int, snapshot: Manifest, head: bytes, encoded: list[tuple[DeltaBucket, bytes]]) -> Manifest:
    return Manifest(
        policy_version=snapshot.policy_version, kind="delta", base_version=base_version,
        num_bytes=len(head) + sum(len(body) for _, body in encoded), chunk_bytes=64, digest=snapshot.digest, tensors=[],
        buckets=[bucket for bucket, _ in encoded], head_digest=bytes_digest(head),
    )  # fmt: skip


def _bucket(old: Bytes, new: Bytes, region: Region) -> tuple[DeltaBucket, bytes, bytes]:
    changes = encode_region(*(region_elements(each, region) for each in (old, new)), region)
    assert changes is not None
    streams = [compress(stream.data) for stream in changes.streams]
    bucket = DeltaBucket(
        region.offset, region.num_elements, region.item_bytes, changes.num_changed, changes.num_absolute,  # type: ignore[arg-type]
        changes.streams[0].nbytes, [len(stream) for stream in streams],
    )  # fmt: skip
    return bucket, changes.digest, b"".join(streams)


# --- false deltas ---------------------------------------------------------------------------------------------------------


def mutate_delta(data: bytes, rng: Random) -> bytes:
    """Change the manifest, the payload, or both so that they still agree."""
    header, _, payload = data.partition(MESSAGE_MARK)
    match rng.randrange(8):
        case 0 | 1:
            return mutate_frames(header, rng) + MESSAGE_MARK + payload
        case 2:
            return header + MESSAGE_MARK + mutate_bytes(payload, rng)
        case _:
            return _rebuilt(header, payload, rng)


def _rebuilt(header: bytes, payload: bytes, rng: Random) -> bytes:
    """A false delta from a peer that knows the format: lengths, digests and compression are right."""
    try:
        manifest = decode([header]).message
        assert isinstance(manifest, Manifest)
        told = decode_head(memoryview(payload), len(LAYOUT), len(manifest.buckets))
        changed, begin = told.tensors, told.num_bytes
        parts = decompressed(manifest, payload)
        bodies = [(bucket, list(each)) for bucket, each in parts]
    except (ProtocolError, ValueError, AssertionError):
        return mutate_bytes(header, rng) + MESSAGE_MARK + payload
    head = payload[:begin]
    lie: Callable[..., bytes] = rng.choice((_other_streams, _bomb, _stowaway, _other_buckets, _other_digest))
    head = lie(rng, bodies, head, sorted(changed))
    # A bucket more than before: the liar has digests of what all of them change, and the learner's name under that.
    added = len(bodies) - len(manifest.buckets)
    if added > 0:
        told_bytes = len(head) - CHANGES_DIGEST_BYTES * len(manifest.buckets)
        head = head[:told_bytes] + b"".join(_digest_of_changes(bucket, each) for bucket, each in bodies)
    encoded = []
    for bucket, each in bodies:
        frames = [compress(stream) for stream in each]
        encoded.append((structs.replace(bucket, stream_bytes=[len(frame) for frame in frames]), b"".join(frames)))
    replaced = structs.replace(
        manifest, num_bytes=len(head) + sum(len(body) for _, body in encoded), buckets=[bucket for bucket, _ in encoded],
        head_digest=bytes_digest(head) if added > 0 else manifest.head_digest,
        digest=rng.choice([manifest.digest] * 3 + [version[0].digest for version in versions()]),
    )  # fmt: skip
    try:
        return joined(replaced, {}, None) + MESSAGE_MARK + head + b"".join(body for _, body in encoded)
    except ProtocolError:
        return header + MESSAGE_MARK + head


def _digest_of_changes(bucket: DeltaBucket, streams: list[bytes]) -> bytes:
    """Of what a bucket changes in the base; zeros where it cannot be read."""
    base = np.frombuffer(versions()[0][1], dtype=np.uint8)
    try:
        changes = decode_streams(bucket, streams, base.nbytes)
    except ValueError:
        return bytes(CHANGES_DIGEST_BYTES)
    was = region_elements(base, changes.region)[changes.positions]
    return changes.digest(was, changes.new_values(was))


Bodies = list[tuple[DeltaBucket, list[bytes]]]


def _other_streams(rng: Random, bodies: Bodies, head: bytes, _: list[int]) -> bytes:
    if bodies:
        bucket, each = rng.choice(bodies)
        at = rng.randrange(len(each))
        each[at] = mutate_bytes(each[at], rng)
        if rng.random() < 0.7:
            index = bodies.index((bucket, each))
            bodies[index] = (structs.replace(bucket, num_gap_bytes=len(each[0]), num_changed=len(each[1])), each)
    return head


def _bomb(rng: Random, bodies: Bodies, head: bytes, _: list[int]) -> bytes:
    """Add streams that are far longer than the version."""
    if bodies:
        at = rng.randrange(len(bodies))
        bucket, each = bodies[at]
        number = rng.choice((2**16, 2**22))
        each[0], each[1] = rng.choice((b"\xff", b"\0")) * (2 * number), bytes(number)
        bodies[at] = (structs.replace(bucket, num_gap_bytes=2 * number, num_changed=number), each)
    return head


def _stowaway(rng: Random, bodies: Bodies, head: bytes, changed: list[int]) -> bytes:
    """Add a bucket for a tensor that gets no new digest."""
    tensors = versions()[0][0].tensors
    others = [index for index, tensor in enumerate(tensors) if index not in changed and tensor.num_bytes]
    if others:
        tensor = tensors[rng.choice(others)]
        size = 4 if tensor.dtype == "float32" else 2
        bucket = DeltaBucket(tensor.offset, tensor.num_bytes // size, size, 1, 0, 1, [1, 1])  # type: ignore[arg-type]
        bodies.append((bucket, [b"\0", bytes([rng.randrange(8)])]))
        bodies.sort(key=lambda each: each[0].offset)
    return head


def _other_buckets(rng: Random, bodies: Bodies, head: bytes, _: list[int]) -> bytes:
    if bodies:
        at = rng.randrange(len(bodies))
        bucket, each = bodies[at]
        match rng.randrange(4):
            case 0:
                del bodies[at]
            case 1:
                bodies.insert(at, bodies[at])
            case 2:
                bodies.reverse()
            case _:
                bodies[at] = (structs.replace(bucket, offset=max(0, bucket.offset + rng.choice((-2, -1, 1, 2, 4)))), each)
    return head


def _other_digest(rng: Random, bodies: Bodies, head: bytes, changed: list[int]) -> bytes:
    """Give other tensors a new digest."""
    tensors = rng.choice(versions())[0].tensors
    kept = [index for index in range(len(tensors)) if (index in changed) != (rng.random() < 0.2)]
    return encode_head(tensors, kept, [bytes(CHANGES_DIGEST_BYTES)] * len(bodies))


def decompressed(manifest: Manifest, payload: bytes) -> list[tuple[DeltaBucket, list[bytes]]]:
    """A delta's buckets with their decompressed streams. Raises: ValueError when payload and manifest disagree."""
    place = decode_head(memoryview(payload), len(LAYOUT), len(manifest.buckets)).num_bytes
    found = []
    for bucket in manifest.buckets:
        bodies = []
        for length, compressed in zip(stream_lengths(bucket), bucket.stream_bytes, strict=True):
            if length > 2**14:
                raise ValueError(f"{length} bytes")
            bodies.append(decompress(payload[place : place + compressed], length))
            place += compressed
        found.append((bucket, bodies))
    return found

"""A rollout's copy: the learner's version bit for bit, or nothing."""

import asyncio
import os
import signal
import time
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from gspo_protocol.limits import MAX_DELTA_BUCKET_ELEMENTS, PROTOCOL_VERSION
from gspo_protocol.messages import DeltaBucket, Manifest
from gspo_services.learner.weights.snapshot import Delta, Snapshot
from gspo_services.rollout.weights.files import WeightFiles
from gspo_services.rollout.weights.replica import DamagedWeightsError, DeltaBytes, Landing, Replica
from gspo_services.shared.weights.compression import compress
from tests.support.wire import snapshots
from tests.support.wire.deltas import a_delta, apply
from tests.support.wire.replicas import content, flip, hold, hold_bytes
from tests.support.wire.snapshots import bytes_of

SHARD_BYTES = 64
"""Most tensors have a file of their own, and some buckets extend over several."""
SIZES = {"a": 5, "b": 300, "tiny": 1, "c": 7, "d": 64}
DTYPES = {"a": torch.bfloat16, "b": torch.bfloat16, "tiny": torch.float32, "c": torch.float32, "d": torch.float16}
Bits = dict[str, np.ndarray]


def snapshot_of(version: int, bits: Bits) -> Snapshot:
    tensors = ((name, torch.from_numpy(each.copy()).view(DTYPES[name])) for name, each in bits.items())
    return snapshots.snapshot_of(version, tensors)


def first_bits() -> Bits:
    generator = np.random.default_rng(1)
    return {
        name: generator.integers(0, 2**15, SIZES[name]).astype(np.int32 if DTYPES[name].itemsize == 4 else np.int16)
        for name in SIZES
    }


def with_steps(bits: Bits, **steps: int) -> Bits:
    """Move the first element of each named tensor by this many steps."""
    changed = {name: each.copy() for name, each in bits.items()}
    for name, step in steps.items():
        changed[name][0] += step
    return changed


def holding(snapshot: Snapshot) -> Replica:
    return hold(Replica(shard_bytes=SHARD_BYTES), snapshot)


def received(delta: Delta) -> DeltaBytes:
    received = DeltaBytes()
    received.put(0, delta.data.data)
    return received


def landed(replica: Replica, snapshot: Snapshot) -> Landing:
    landing = replica.landing(snapshot.manifest)
    landing.put(0, memoryview(bytes_of(snapshot)))
    return landing


def unloaded(replica: Replica) -> list[str]:
    return [replica.current.tensors[index].name for index in replica.unloaded()]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), st.integers(-2000, 2000), min_size=1), max_size=6))
def test_a_chain_of_deltas_leads_to_the_same_bytes_as_the_snapshot(history: list[dict[str, int]]) -> None:
    bits = first_bits()
    newest = snapshot_of(1, bits)
    replica = holding(newest)
    for version, steps in enumerate(history, start=2):
        bits = with_steps(bits, **steps)
        base, newest = newest, snapshot_of(version, bits)
        apply(replica, a_delta(base, newest))
    assert replica.manifest == newest.manifest
    assert content(replica) == bytes_of(newest)
    assert replica.policy_version == len(history) + 1
    assert b"".join(bytes(data) for _, data in replica.tensors()) == bytes_of(newest)


def test_the_engine_gets_the_tensors_that_changed_since_it_loaded() -> None:
    bits = first_bits()
    versions = [snapshot_of(1, bits)]
    for version, name in ((2, "b"), (3, "d"), (4, "c")):
        bits = with_steps(bits, **{name: 3})
        versions.append(snapshot_of(version, bits))
    replica = holding(versions[0])
    assert unloaded(replica) == list(SIZES)
    assert replica.loads_all
    replica.was_loaded()
    assert not replica.loads_all
    # An engine needs a tensor to load.
    assert unloaded(replica) == ["tiny"]
    apply(replica, a_delta(versions[0], versions[1]))
    assert unloaded(replica) == ["b"]
    apply(replica, a_delta(versions[1], versions[2]))
    assert unloaded(replica) == ["b", "d"]
    replica.was_loaded()
    apply(replica, a_delta(versions[2], versions[3]))
    assert unloaded(replica) == ["c"]
    replica.must_load_all()
    assert unloaded(replica) == list(SIZES)
    hold(replica, versions[0])
    assert replica.loads_all


def test_a_delta_against_another_version_changes_nothing() -> None:
    bits = first_bits()
    first, second, third = (snapshot_of(version, with_steps(bits, b=version)) for version in (1, 2, 3))
    replica = holding(first)
    with pytest.raises(ValueError, match="delta of version 3 against 2; the replica has 1"):
        apply(replica, a_delta(second, third))
    assert content(replica) == bytes_of(first)
    assert replica.policy_version == 1
    with pytest.raises(ValueError, match="the replica is empty"):
        apply(Replica(), a_delta(first, second))


def damaged(delta: Delta, place: int) -> bytes:
    data = bytearray(delta.data.tobytes())
    data[place] ^= 1
    return bytes(data)


def test_a_damaged_byte_anywhere_in_a_delta_is_found_and_empties_the_replica() -> None:
    bits = first_bits()
    base, snapshot = snapshot_of(1, bits), snapshot_of(2, with_steps(bits, a=1, b=900, c=2, d=-5))
    delta = a_delta(base, snapshot)
    found = 0
    for place in range(delta.manifest.num_bytes):
        replica = holding(base)
        try:
            replica.apply(delta.manifest, damaged(delta, place))
        except DamagedWeightsError:
            found += 1
            assert replica.manifest is None
            assert replica.policy_version == 0
            assert content(replica) == b""
        else:
            # A bit without meaning, such as one of zstd's unused ones.
            assert content(replica) == bytes_of(snapshot)
    assert found > 0.9 * delta.manifest.num_bytes


def test_damage_of_the_base_is_found_although_no_delta_touches_it() -> None:
    """The damage is in a tensor that does not change: after a few deltas all tensors have been checked."""
    bits = first_bits()
    newest = snapshot_of(1, bits)
    replica = holding(newest)
    place = newest.manifest.tensors[-1].offset
    flip(replica, place)
    with pytest.raises(DamagedWeightsError, match="tensor d has digest"):  # noqa: PT012 - which of them finds it is open
        for version in range(2, 80):
            bits = with_steps(bits, a=1)
            base, newest = newest, snapshot_of(version, bits)
            apply(replica, a_delta(base, newest))


@pytest.mark.parametrize("damaged_tensor", [3, 4])
def test_each_delta_checks_a_part_of_all_bytes_and_no_more(damaged_tensor: int) -> None:
    """One of 32 equal tensors with every second delta, in turn."""

    def version(number: int) -> Snapshot:
        return snapshots.snapshot_of(
            number, ((f"t{at:02}", torch.full((16,), number if at == 0 else at, dtype=torch.bfloat16)) for at in range(32))
        )

    versions = [version(number) for number in range(1, 2 * damaged_tensor + 4)]
    replica = holding(versions[0])
    flip(replica, versions[0].manifest.tensors[damaged_tensor].offset)
    for base, snapshot in pairwise(versions[:-1]):
        apply(replica, a_delta(base, snapshot))
    with pytest.raises(DamagedWeightsError, match=f"tensor t0{damaged_tensor} has digest"):
        apply(replica, a_delta(versions[-2], versions[-1]))


def test_any_error_while_a_delta_is_applied_empties_the_replica() -> None:
    """Bytes between two versions must not be taken for either, even after an unexpected error."""
    bits = first_bits()
    base, snapshot = snapshot_of(1, bits), snapshot_of(2, with_steps(bits, b=1))
    replica = holding(base)
    with pytest.raises(TypeError):
        replica.apply(a_delta(base, snapshot).manifest, "no bytes")  # type: ignore[arg-type]
    assert replica.manifest is None
    assert replica.policy_version == 0


async def test_no_rollout_gets_a_version_that_is_being_checked() -> None:
    """Neither the former one, whose bytes change, nor the new one before ``take`` has returned."""
    bits = first_bits()
    base, snapshot = snapshot_of(1, bits), snapshot_of(2, with_steps(bits, b=1))
    replica = holding(base)
    delta = a_delta(base, snapshot)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(replica.take(delta.manifest, received(delta)))
        await asyncio.sleep(0)
        # The thread does its work, and the loop does not continue yet.
        deadline = time.monotonic() + 60
        while replica.policy_version != 2:
            assert replica.parts(1, 0) is None
            assert time.monotonic() < deadline
        assert replica.parts(2, 0) is None
    assert replica.parts(2, 0) is not None


async def test_a_version_that_is_being_fetched_counts_as_the_newest() -> None:
    snapshot = snapshot_of(5, first_bits())
    replica = Replica()
    assert replica.newest_version == 0
    replica.coming = 5
    assert replica.newest_version == 5
    assert replica.parts(5, 0) is None
    await replica.take(snapshot.manifest, landed(replica, snapshot))
    replica.coming = 4
    assert replica.newest_version == 5
    assert replica.parts(5, 0) is not None


def test_a_snapshot_that_does_not_match_its_manifest_is_not_kept() -> None:
    snapshot = snapshot_of(1, first_bits())
    data = bytearray(bytes_of(snapshot))
    data[snapshot.manifest.tensors[1].offset] ^= 1
    replica = holding(snapshot)
    with pytest.raises(DamagedWeightsError, match="tensor b has digest"):
        hold_bytes(replica, snapshot.manifest, data)
    assert replica.manifest is None


def changed_bucket(index: int, **fields: object) -> Callable[[Manifest], Manifest]:
    def change(manifest: Manifest) -> Manifest:
        buckets = list(manifest.buckets)
        buckets[index] = structs.replace(buckets[index], **fields)
        return structs.replace(manifest, buckets=buckets)

    return change


def in_one_place(manifest: Manifest) -> Manifest:
    first, second = manifest.buckets[:2]
    return structs.replace(manifest, buckets=[first, structs.replace(second, offset=first.offset), *manifest.buckets[2:]])


def swapped(manifest: Manifest) -> Manifest:
    return structs.replace(manifest, buckets=manifest.buckets[::-1])


def with_another(manifest: Manifest) -> Manifest:
    return structs.replace(manifest, buckets=[*manifest.buckets, DeltaBucket(0, 1, 2, 1, 0, 1, [1, 1])])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_another, "its head has digest"),
        (lambda manifest: structs.replace(manifest, num_bytes=manifest.num_bytes + 1), "head and buckets have"),
        (lambda manifest: structs.replace(manifest, head_digest="0" * 64), "the manifest says 000"),
        (swapped, r"bucket at \d+: its changes have digest"),
        (in_one_place, r"bucket at \d+ begins before"),
        (changed_bucket(0, offset=0, num_elements=300), "changes tensor a, but the delta lacks its digest"),
        (changed_bucket(1, num_elements=71), "changes tensor d, but the delta lacks its digest"),
        # One element, and one byte, too far.
        (changed_bucket(1, num_elements=8), "changes tensor d, but the delta lacks its digest"),
        (changed_bucket(0, offset=11), "changes tensor tiny, but the delta lacks its digest"),
        (changed_bucket(1, num_absolute=1), "streams, 6 expected"),
        (lambda manifest: structs.replace(manifest, digest="0" * 64), "the base was a different one"),
    ],
)
def test_a_manifest_that_contradicts_its_payload_is_refused(change: Callable[[Manifest], Manifest], words: str) -> None:
    bits = first_bits()
    base, snapshot = snapshot_of(1, bits), snapshot_of(2, with_steps(bits, b=1, c=1))
    delta = a_delta(base, snapshot)
    replica = holding(base)
    with pytest.raises(DamagedWeightsError, match=words):
        replica.apply(change(delta.manifest), delta.data.tobytes())
    assert replica.manifest is None


def test_a_few_bytes_of_delta_do_not_take_the_memory_that_they_name() -> None:
    """Millions of zeros compress to nothing, and a version of a thousand bytes has fewer positions."""
    bits = first_bits()
    base, snapshot = snapshot_of(1, bits), snapshot_of(2, with_steps(bits, b=1))
    delta = a_delta(base, snapshot)
    (bucket,) = delta.manifest.buckets
    number = MAX_DELTA_BUCKET_ELEMENTS
    frames = [compress(bytes(2 * number)), compress(bytes(number))]
    head = delta.data.tobytes()[: delta.manifest.num_bytes - sum(bucket.stream_bytes)]
    bomb = structs.replace(
        bucket, num_changed=number, num_gap_bytes=2 * number, stream_bytes=[len(frame) for frame in frames]
    )
    payload = b"".join([head, *frames])
    manifest = structs.replace(delta.manifest, num_bytes=len(payload), buckets=[bomb])
    replica = holding(base)
    tracemalloc.start()
    try:
        with pytest.raises(DamagedWeightsError, match="4194304 of 300 elements are said to change"):
            replica.apply(manifest, payload)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(payload) < 2000
    assert peak < 1024 * 1024


async def test_other_rollouts_get_the_version_of_the_replica_and_the_last_deltas_and_nothing_else() -> None:
    bits = first_bits()
    versions = [snapshot_of(version, with_steps(bits, b=version)) for version in range(1, 5)]
    replica = Replica(keep_deltas=2)
    await replica.take(versions[0].manifest, landed(replica, versions[0]))
    first = replica.parts(1, 0)
    assert first is not None
    leaving = first.chunk(0)
    deltas = [a_delta(base, snapshot) for base, snapshot in pairwise(versions)]
    for delta in deltas:
        await replica.take(delta.manifest, received(delta))
    assert leaving.tobytes() == bytes_of(versions[0]), "a slow peer takes it while the files change"
    newest = replica.parts(4, 0)
    assert newest is not None
    assert newest.num_chunks == 1
    assert newest.chunk(0).tobytes() == bytes_of(versions[3])
    assert replica.parts(3, 0) is None
    kept = [replica.parts(base + 1, base) for base in (1, 2, 3)]
    assert kept[0] is None
    assert [parts and parts.data.tobytes() for parts in kept[1:]] == [delta.data.tobytes() for delta in deltas[1:]]
    assert replica.parts(4, 2) is None
    replica.forget()
    assert replica.parts(4, 0) is None
    assert replica.parts(4, 3) is None


def restored(directory: Path) -> Replica:
    replica = Replica(directory, shard_bytes=SHARD_BYTES)
    assert replica.restore() == (replica.policy_version > 0)
    return replica


def test_the_next_process_takes_over_what_a_killed_one_held(tmp_path: Path) -> None:
    bits = first_bits()
    first, second, third = (snapshot_of(version, with_steps(bits, b=version)) for version in (1, 2, 3))
    replica = hold(Replica(tmp_path, shard_bytes=SHARD_BYTES), first)
    apply(replica, a_delta(first, second))
    again = restored(tmp_path)
    assert (again.manifest, content(again)) == (second.manifest, bytes_of(second))
    assert again.loads_all, "what the engine has is unknown"
    apply(again, a_delta(second, third))
    assert content(restored(tmp_path)) == bytes_of(third)
    again.forget()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("at", ["before the first bucket", "between two buckets", "before the mark"])
def test_a_process_that_is_killed_within_a_delta_leaves_nothing_that_is_taken_over(tmp_path: Path, at: str) -> None:
    """In a process of its own, which ends without a word in the middle of ``apply``."""
    bits = first_bits()
    base, snapshot = snapshot_of(1, bits), snapshot_of(2, with_steps(bits, a=1, b=900, c=2, d=-5))
    delta = a_delta(base, snapshot)
    assert len(delta.manifest.buckets) > 1
    replica = hold(Replica(tmp_path, shard_bytes=SHARD_BYTES), base)
    child = os.fork()
    if not child:
        number = {"before the first bucket": 0, "between two buckets": 1, "before the mark": -1}[at]
        scatter = WeightFiles.scatter

        def until(files: WeightFiles, offset: int, *rest: Any) -> None:
            if offset == delta.manifest.buckets[number].offset and number >= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            scatter(files, offset, *rest)

        WeightFiles.scatter = until  # type: ignore[method-assign]
        Replica._check_some = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, assignment]
        apply(replica, delta)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    again = restored(tmp_path)
    assert again.policy_version == 0
    assert list(tmp_path.iterdir()) == []
    hold(again, snapshot)
    assert content(restored(tmp_path)) == bytes_of(snapshot)


@pytest.mark.parametrize("damage", ["a byte", "a file", "the mark", "another layout", "another release"])
def test_files_that_are_not_what_their_mark_says_are_removed(tmp_path: Path, damage: str) -> None:
    snapshot = snapshot_of(1, first_bits())
    hold(Replica(tmp_path, shard_bytes=SHARD_BYTES), snapshot)
    file, mark = sorted(tmp_path.glob("weights-*"))[1], tmp_path / "version.msgpack"
    if damage == "a byte":
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    elif damage == "a file":
        file.unlink()
    elif damage == "the mark":
        mark.write_bytes(mark.read_bytes()[:-1])
    elif damage == "another layout":
        assert not Replica(tmp_path, shard_bytes=SHARD_BYTES + 1).restore()
    else:
        mark.write_bytes(mark.read_bytes().replace(bytes([0x93, PROTOCOL_VERSION]), bytes([0x93, PROTOCOL_VERSION - 1]), 1))
    assert restored(tmp_path).policy_version == 0
    assert list(tmp_path.iterdir()) == []

"""Deltas: exact for every bit pattern, harmless when applied twice, and refused when they contradict themselves."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from msgspec import structs

from gspo_protocol.deltas import (
    CHANGES_DIGEST_BYTES,
    Changes,
    Region,
    check_bucket,
    decode_head,
    encode_head,
    encode_region,
    region_elements,
    regions,
    stream_lengths,
)
from gspo_protocol.limits import MAX_DELTA_BUCKET_ELEMENTS
from gspo_protocol.messages import DeltaBucket, TensorInfo
from tests.support.wire.streams import apply_streams

SIZES = st.sampled_from([2, 4])


def encoded(old: np.ndarray, new: np.ndarray, region: Region) -> Changes | None:
    """The changes of a region of two versions, given in whole."""
    before, after = (region_elements(each.view(np.uint8), region) for each in (old, new))
    return encode_region(before, after, region)


def bucket_of(changes: Changes) -> DeltaBucket:
    region = changes.region
    return DeltaBucket(
        region.offset,
        region.num_elements,
        region.item_bytes,  # type: ignore[arg-type]
        changes.num_changed,
        changes.num_absolute,
        changes.streams[0].nbytes,
        [1, 1],
    )


def apply(target: np.ndarray, changes: Changes, **other: int) -> None:
    bucket = structs.replace(bucket_of(changes), **other)
    apply_streams(target, bucket, [stream.tobytes() for stream in changes.streams])


@st.composite
def versions(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, Region]:
    """Two versions and a region of them: any bits, and steps of any size from one to the other."""
    size = draw(SIZES)
    kind = np.dtype(f"<u{size}")
    old = draw(hnp.arrays(kind, st.integers(1, 700)))
    steps = st.one_of(st.just(0), st.integers(-9, 9), st.integers(0, 2 ** (8 * size) - 1))
    change = draw(hnp.arrays(np.int64, len(old), elements=steps, fill=st.just(0)))
    new = (old.astype(np.int64) + change).astype(kind)
    begin = draw(st.integers(0, len(old) - 1))
    number = draw(st.integers(1, len(old) - begin))
    # An odd offset: a tensor of 2-byte elements may lie before one of 4.
    front = np.zeros(draw(st.sampled_from([0, 2])), dtype=np.uint8)
    region = Region(offset=len(front) + begin * size, num_elements=number, item_bytes=size)
    return np.concatenate([front, old.view(np.uint8)]), np.concatenate([front, new.view(np.uint8)]), region


@settings(deadline=None)
@given(versions())
def test_a_region_becomes_the_new_version_bit_for_bit_and_nothing_else_changes(case: tuple) -> None:
    old, new, region = case
    begin, end = region.offset, region.offset + region.num_elements * region.item_bytes
    expected = np.concatenate([old[:begin], new[begin:end], old[end:]])
    num_changed = (old[begin:end] != new[begin:end]).reshape(-1, region.item_bytes).any(axis=1).sum()
    changes = encoded(old, new, region)
    if changes is None:
        assert expected.tobytes() == old.tobytes()
        assert num_changed == 0
        return
    assert changes.num_changed == num_changed
    target = old.copy()
    apply(target, changes)
    assert target.tobytes() == expected.tobytes()
    apply(target, changes)
    assert target.tobytes() == expected.tobytes()


@settings(deadline=None)
@given(versions(), st.randoms(use_true_random=False))
def test_a_delta_that_was_applied_in_part_still_leads_to_the_new_version(case: tuple, rng: object) -> None:
    old, new, region = case
    changes = encoded(old, new, region)
    if changes is None:
        return
    size = region.item_bytes
    mixed = old.copy()
    for at in range(region.offset, region.offset + region.num_elements * size, size):
        if rng.random() < 0.5:  # type: ignore[attr-defined]
            mixed[at : at + size] = new[at : at + size]
    apply(mixed, changes)
    end = region.offset + region.num_elements * size
    assert mixed[region.offset : end].tobytes() == new[region.offset : end].tobytes()


def test_one_step_of_a_bfloat16_takes_no_absolute_value_and_a_far_one_does() -> None:
    old = np.array([0x3F80, 0x3F80, 0x0000, 0xFFFF], dtype="<u2")
    new = np.array([0x3F81, 0x3F7C, 0xFFFC, 0x0003], dtype="<u2")
    region = Region(offset=0, num_elements=4, item_bytes=2)
    changes = encoded(old, new, region)
    assert changes is not None
    # +1, -4 and the two around zero: -4 and +4, of which the last is too far.
    assert [stream.tolist() for stream in changes.streams] == [[0, 0, 0, 0], [1, 4, 4, 8], [6], [0]]
    assert (changes.num_changed, changes.num_absolute) == (4, 1)


def test_long_gaps_take_one_byte_for_every_255_elements() -> None:
    old = np.zeros(2000, dtype="<u2")
    new = old.copy()
    new[[254, 510, 1999]] = 1
    region = Region(offset=0, num_elements=2000, item_bytes=2)
    changes = encoded(old, new, region)
    assert changes is not None
    assert changes.streams[0].tolist() == [254, 255, 0, 255, 255, 255, 255, 255, 213]
    assert stream_lengths(bucket_of(changes)) == [9, 3]
    assert changes.num_bytes == 12


@pytest.mark.parametrize("num_wide", [0, 1, 5, 40])
def test_gaps_are_the_same_bytes_whether_few_of_them_are_long_or_most(num_wide: int) -> None:
    gaps = [*range(41), *(254 + 128 * wide for wide in range(1, num_wide + 1))]
    gaps = [gaps[place] for place in np.random.default_rng(num_wide).permutation(len(gaps))]
    places = np.cumsum(np.array(gaps) + 1) - 1
    new = np.zeros(places[-1] + 1, dtype="<u2")
    new[places] = 1
    region = Region(offset=0, num_elements=len(new), item_bytes=2)
    changes = encoded(np.zeros_like(new), new, region)
    assert changes is not None
    assert bytes(changes.streams[0]) == b"".join(bytes([255] * (gap // 255) + [gap % 255]) for gap in gaps)


def some_changes() -> tuple[np.ndarray, Changes]:
    old = np.arange(100, dtype="<u2").view(np.uint8)
    new = np.arange(100, dtype="<u2")
    new[[3, 40, 99]] = [4, 5000, 98]
    changes = encoded(old, new, Region(offset=0, num_elements=100, item_bytes=2))
    assert changes is not None
    return old.copy(), changes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_elements": 101}, "101 elements of 2 bytes do not fit into a version of 200"),
        ({"offset": 2}, "bucket at 2: 100 elements of 2 bytes do not fit"),
        ({"num_elements": 99}, "position 99 is outside of its 99 elements"),
        ({"num_changed": 4}, r"its streams have \[3, 3, 1, 1\] bytes, \[3, 4, 1, 1\] expected"),
        ({"num_absolute": 2}, r"\[3, 3, 2, 2\] expected"),
        ({"item_bytes": 4, "num_elements": 50}, r"\[3, 3, 1, 1, 1, 1\] expected"),
    ],
)
def test_a_bucket_that_contradicts_its_streams_is_refused_and_writes_nothing(change: dict[str, int], words: str) -> None:
    target, changes = some_changes()
    before = target.tobytes()
    with pytest.raises(ValueError, match=words):
        apply(target, changes, **change)
    assert target.tobytes() == before


def test_a_bucket_takes_no_more_than_its_place_in_the_version_can() -> None:
    """This is checked before anything is decompressed."""
    bucket = DeltaBucket(100, 1000, 2, 1000, 1000, 1003, [1, 1, 1, 1])
    check_bucket(bucket, 2100)
    for change, words in (
        ({"offset": 102}, "bucket at 102: 1000 elements of 2 bytes do not fit into a version of 2100"),
        ({"num_changed": 1001}, "1001 of 1000 elements are said to change, 1000 of them to absolute values"),
        ({"num_changed": 999}, "999 of 1000 elements are said to change, 1000 of them"),
        ({"num_gap_bytes": 1004}, "1004 bytes of gaps; 1000 changes of 1000 elements take 1003 at most"),
    ):
        with pytest.raises(ValueError, match=words):
            check_bucket(structs.replace(bucket, **change), 2100)


def test_the_longest_possible_gaps_fit() -> None:
    """One change, as far from the beginning as possible, after bytes of 255 only."""
    for size in (255, 256, 510, 511, 766):
        old = np.zeros(size, dtype="<u2")
        new = old.copy()
        new[-1] = 1
        changes = encoded(old, new, Region(offset=0, num_elements=size, item_bytes=2))
        assert changes is not None
        assert changes.streams[0].nbytes == 1 + (size - 1) // 255
        check_bucket(bucket_of(changes), 2 * size)


def test_streams_that_contradict_each_other_are_refused_and_write_nothing() -> None:
    target, changes = some_changes()
    before, bucket = target.tobytes(), bucket_of(changes)
    gaps, residues, *planes = (stream.tobytes() for stream in changes.streams)
    with pytest.raises(ValueError, match="2 positions, num_changed is 3"):
        apply_streams(target, bucket, [gaps[:2] + b"\xff", residues, *planes])
    with pytest.raises(ValueError, match="0 values are absolute, num_absolute is 1"):
        apply_streams(target, bucket, [gaps, bytes(3), *planes])
    assert target.tobytes() == before


def tensor(offset: int, num_elements: int, dtype: str = "bfloat16", digest: str = "00") -> TensorInfo:
    size = 4 if dtype == "float32" else 2
    return TensorInfo(f"t{offset}", dtype, [num_elements], offset, size * num_elements, digest * 32)  # type: ignore[arg-type]


def test_neighbours_of_one_size_share_a_bucket_and_long_ones_are_cut() -> None:
    long = MAX_DELTA_BUCKET_ELEMENTS + 5
    tensors = [
        tensor(0, 3),
        tensor(6, 4),
        tensor(14, 0),
        tensor(14, 5, "float32"),
        tensor(34, 2),
        tensor(38, 2),
        tensor(42, long),
    ]
    runs = [
        (each.offset, each.offset + each.num_bytes, 4 if each.dtype == "float32" else 2)
        for each in (tensors[at] for at in (0, 1, 2, 3, 4, 6))
    ]
    found = [(region.offset, region.num_elements, region.item_bytes) for region in regions(runs)]
    assert found == [
        (0, 7, 2),
        (14, 5, 4),
        (34, 2, 2),
        (42, MAX_DELTA_BUCKET_ELEMENTS, 2),
        (42 + 2 * MAX_DELTA_BUCKET_ELEMENTS, 5, 2),
    ]


def test_the_head_holds_the_digests_of_what_changed() -> None:
    tensors = [tensor(2 * index, 1, digest=f"{index:02x}") for index in range(11)]
    buckets = [b"first bucket, 16", b"second bucket 16"]
    payload = encode_head(tensors, [1, 8, 10], buckets)
    head = decode_head(memoryview(payload + b"rest"), 11, 2)
    assert head.tensors == {1: "01" * 32, 8: "08" * 32, 10: "0a" * 32}
    assert head.buckets == buckets
    assert head.num_bytes == len(payload) == 2 + 3 * 32 + 2 * 16
    with pytest.raises(ValueError, match="delta has 129 bytes, the digests of its 3 changed tensors and 2 buckets take 130"):
        decode_head(memoryview(payload[:-1]), 11, 2)
    with pytest.raises(ValueError, match="delta has 1 bytes, the bits of 11 tensors take 2"):
        decode_head(memoryview(payload[:1]), 11, 2)


@pytest.mark.parametrize("num_tensors", [1, 7, 8, 9, 15, 16, 17, 72, 73])
def test_a_head_alone_is_a_delta_that_changes_nothing_or_only_names_what_it_leads_to(num_tensors: int) -> None:
    tensors = [tensor(2 * index, 1, digest=f"{index:02x}") for index in range(num_tensors)]
    num_bits_bytes = (num_tensors + 7) // 8
    head = decode_head(memoryview(encode_head(tensors, [], [])), num_tensors, 0)
    assert (head.tensors, head.buckets, head.num_bytes) == ({}, [], num_bits_bytes)
    last = num_tensors - 1
    head = decode_head(memoryview(encode_head(tensors, [last], [])), num_tensors, 0)
    assert (head.tensors, head.num_bytes) == ({last: f"{last:02x}" * 32}, num_bits_bytes + 32)


def test_the_digest_of_changes_covers_places_old_values_and_new_ones() -> None:
    old = np.arange(100, dtype=np.uint16)
    region = Region(offset=0, num_elements=100, item_bytes=2)

    def digest(**steps: int) -> bytes:
        new = old.copy()
        for place, step in steps.items():
            new[int(place[1:])] += step
        changes = encoded(old, new, region)
        assert changes is not None
        return changes.digest

    old[[8, 9]] = 8
    assert len({digest(p7=1), digest(p7=2), digest(p8=1), digest(p9=1), digest(p7=1, p8=1)}) == 5
    before = digest(p7=1)
    old[7] = 6
    assert digest(p7=2) != before, "the same new value from another old one"
    assert len(before) == CHANGES_DIGEST_BYTES

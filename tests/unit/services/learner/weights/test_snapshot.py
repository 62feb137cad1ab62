"""Snapshots: a frozen copy of the weights, in bytes that can be checked."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from gspo_protocol.digests import tensor_digest, version_digest
from gspo_services.learner.weights.snapshot import CHUNK_BYTES, Snapshot, SnapshotStore
from tests.support.wire.snapshots import bytes_of, snapshot_of


def test_a_snapshot_holds_every_tensors_bytes_in_order_with_their_digests() -> None:
    weights = {
        "a": torch.tensor([[1.0, -2.0], [0.5, 4.0]]),
        "b": torch.tensor([1.0, 3.0], dtype=torch.bfloat16),
        "c": torch.arange(6, dtype=torch.float32).reshape(2, 3).t(),
    }
    snapshot = snapshot_of(5, weights.items())
    manifest = snapshot.manifest
    assert [(t.name, t.dtype, t.shape, t.offset, t.num_bytes) for t in manifest.tensors] == [
        ("a", "float32", [2, 2], 0, 16),
        ("b", "bfloat16", [2], 16, 4),
        ("c", "float32", [3, 2], 20, 24),
    ]
    expected = (
        np.float32([1, -2, 0.5, 4]).tobytes() + bytes([0x80, 0x3F, 0x40, 0x40]) + np.float32([0, 3, 1, 4, 2, 5]).tobytes()
    )
    assert bytes_of(snapshot) == expected
    assert manifest.num_bytes == 44
    assert [t.digest for t in manifest.tensors] == [
        tensor_digest(part) for part in (expected[:16], expected[16:20], expected[20:])
    ]
    assert manifest.digest == version_digest(manifest.tensors)


def test_further_training_does_not_change_a_snapshot() -> None:
    weight = torch.zeros(4, requires_grad=True)
    snapshot = snapshot_of(1, [("w", weight)])
    with torch.no_grad():
        weight += 1
    assert not any(bytes_of(snapshot))
    assert tensor_digest(memoryview(bytes_of(snapshot))) == snapshot.manifest.tensors[0].digest


def test_tensors_may_share_a_buffer_that_is_filled_again_for_the_next_one() -> None:
    def exported() -> Iterator[tuple[str, torch.Tensor]]:
        buffer = torch.empty(2)
        for value in (1.0, 2.0):
            buffer.fill_(value)
            yield f"w{value:.0f}", buffer

    assert bytes_of(snapshot_of(1, exported())) == np.float32([1, 1, 2, 2]).tobytes()


def test_pieces_that_meet_within_a_chunk_are_read_as_one_row() -> None:
    weights = {"a": torch.arange(7, dtype=torch.float32), "empty": torch.zeros(0), "b": torch.arange(3, dtype=torch.float32)}
    snapshot = snapshot_of(1, weights.items())
    expected = np.float32([*range(7), *range(3)]).tobytes()
    for begin in range(len(expected)):
        for end in range(begin, len(expected) + 1):
            assert snapshot.read(begin, end).tobytes() == expected[begin:end]
    assert [each.digest for each in snapshot.manifest.tensors] == [tensor_digest(each) for each in snapshot.tensor_data()]


def test_chunks_are_the_bytes_in_order() -> None:
    snapshot = snapshot_of(1, [("w", torch.arange(CHUNK_BYTES // 4 + 3, dtype=torch.float32))])
    assert snapshot.num_chunks == 2
    assert [snapshot.chunk(index).nbytes for index in range(2)] == [CHUNK_BYTES, 12]
    assert b"".join(snapshot.chunk(index).tobytes() for index in range(2)) == bytes_of(snapshot)


def test_a_dtype_that_cannot_be_sent_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"tensor ids has dtype torch\.int64: one of \['bfloat16', 'float16', 'float32'\]"):
        snapshot_of(1, [("ids", torch.zeros(2, dtype=torch.int64))])
    with pytest.raises(ValueError, match="policy version 1 has no tensors"):
        snapshot_of(1, [])


def a_snapshot(version: int) -> Snapshot:
    return snapshot_of(version, [("w", torch.full((2,), float(version)))])


def test_of_versions_that_are_fetched_the_store_keeps_the_newest_two() -> None:
    store = SnapshotStore(keep=2)
    assert store.newest is None
    for version in (1, 2, 4):
        store.add(a_snapshot(version))
        store.fetches(b"a rollout of %d" % version, version)
    assert store.newest is not None
    assert store.newest.policy_version == 4
    assert store.get(1) is None
    assert store.get(2) is not None


@pytest.mark.parametrize("version", [3, 4])
def test_a_version_is_never_reused(version: int) -> None:
    store = SnapshotStore()
    store.add(a_snapshot(4))
    with pytest.raises(ValueError, match=f"policy version {version} after 4"):
        store.add(a_snapshot(version))

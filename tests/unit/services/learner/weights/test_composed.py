"""One version from the parts of several ranks, however they cut it; parts that are no version are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gspo_protocol.messages import PartReady
from gspo_protocol.tiles import TILE_BYTES
from gspo_services.learner.weights import Snapshot, WeightCopy, composed, copy_weights, encode_changes
from gspo_services.shared.net import Delivered
from gspo_services.shared.runtime.errors import ServiceError
from tests.support.wire.shared_version import cut_copy
from tests.support.wire.snapshots import snapshot_of

TILE = TILE_BYTES // 2
SIZES = {"a": 2 * TILE, "b": TILE + 5, "empty": 0, "c": 3, "d": TILE, "e": 7}
NUM_BYTES = 2 * sum(SIZES.values())


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, generator=generator).bfloat16() for name, size in SIZES.items()}


def ready(part: WeightCopy, base: WeightCopy | None = None, base_version: int = 0) -> Delivered:
    """What a rank says of its part."""
    buckets = [] if base is None else encode_changes(base, part)
    assert buckets is not None
    arrays: dict[str, Any] = {
        "spans": np.array([(piece.begin, len(piece.data)) for piece in part.pieces], dtype=np.int64).reshape(-1, 2),
        "sums": np.concatenate([np.empty(0, np.uint64), *part.sums()]).view(np.int64),
        "digests": np.frombuffer(b"".join(each.digest for each in buckets), np.uint8).reshape(-1, 16),
    }
    message = PartReady(policy_version=2, base_version=base_version, buckets=[each.bucket for each in buckets])
    return Delivered(message=message, arrays=arrays)


def version(parts: list[WeightCopy], others: list[Delivered] | None = None) -> Snapshot:
    others = [ready(part) for part in parts[1:]] if others is None else others
    return composed(2, parts[0], None, None, others, [f"tcp://rank:{at}" for at in range(len(others))])[0]


@given(st.lists(st.integers(0, NUM_BYTES // 2), max_size=8), st.integers(1, 4))
def test_any_cut_has_the_digests_of_the_whole(cuts: list[int], num_ranks: int) -> None:
    whole = copy_weights(tensors(1).items())
    found = version(cut_copy(whole, sorted({2 * cut for cut in cuts}), num_ranks))
    expected = snapshot_of(2, tensors(1).items()).manifest
    assert (found.manifest.digest, found.manifest.tensors) == (expected.digest, expected.tensors)
    assert sum(part.num_bytes for part in found.manifest.parts) == (NUM_BYTES if num_ranks > 1 else 0)


def test_a_delta_names_the_changes_of_all_ranks_in_the_order_of_its_parts() -> None:
    cuts = [1000, 2 * TILE, 5 * TILE]
    changed = tensors(1)
    changed["a"][7] += 1
    changed["d"][TILE - 1] += 1
    before, after = (cut_copy(copy_weights(each.items()), cuts, 2) for each in (tensors(1), changed))
    base = version(before)
    own = encode_changes(before[0], after[0])
    snapshot, delta = composed(3, after[0], base, own, [ready(after[1], before[1], 2)], ["tcp://rank:1"])
    assert delta is not None
    assert [bucket.num_changed for bucket in delta.manifest.buckets] == [1, 1]
    sizes = [sum(bucket.stream_bytes) for bucket in delta.manifest.buckets]
    head = delta.manifest.num_bytes - sum(sizes)
    assert [(part.num_bytes, part.endpoint) for part in delta.manifest.parts] == [
        (head + sizes[0], ""), (sizes[1], "tcp://rank:1")
    ]  # fmt: skip
    assert delta.num_bytes == head + sizes[0]
    assert snapshot.manifest.digest == delta.manifest.digest
    assert composed(3, after[0], base, own, [ready(after[1])], ["tcp://rank:1"])[1] is None, "a rank without its former part"
    assert composed(3, after[0], base, None, [ready(after[1], before[1], 2)], ["tcp://rank:1"])[1] is None


def test_parts_that_are_no_version_are_refused() -> None:
    parts = cut_copy(copy_weights(tensors(1).items()), [1000, 4000], 3)
    for others, words in (
        ([ready(parts[1]), ready(parts[1])], r"bytes 1000 to 4000 are twice"),
        ([ready(parts[2])], r"bytes 1000 to 4000 are nowhere"),
        ([ready(parts[1])], r"the ranks have 4000 bytes of a version of"),
    ):
        with pytest.raises(ServiceError, match=words):
            version(parts, others)
    for change in (lambda sums: sums[:-1], lambda sums: np.append(sums, 1)):
        wrong = ready(parts[2])
        wrong.arrays["sums"] = change(wrong.arrays["sums"])
        with pytest.raises(ServiceError, match=r"rank 2 has sent .* sums, which are not those of its part"):
            version(parts, [ready(parts[1]), wrong])

"""Deltas of the learner's snapshots: which are made, kept, and offered to a peer."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from gspo_protocol.deltas import Region
from gspo_protocol.limits import MAX_DELTA_BUCKET_ELEMENTS
from gspo_services.learner.weights.delta import WORTHWHILE, ComparedRegion, encode_delta, samples
from gspo_services.learner.weights.snapshot import Delta, Snapshot, SnapshotStore
from tests.support.wire.snapshots import snapshot_of


def a_snapshot(version: int, changed: int = 0, *, size: int = 4096, dtype: torch.dtype = torch.bfloat16) -> Snapshot:
    """Tensors ``first`` and ``second``; in the latter ``changed`` elements differ from those of other calls."""
    second = torch.ones(size, dtype=dtype)
    second[:changed] += version
    return snapshot_of(version, [("first", torch.zeros(size, dtype=dtype)), ("second", second)])


def a_delta(base: Snapshot, snapshot: Snapshot) -> Delta:
    delta = encode_delta(base, snapshot)
    assert delta is not None
    return delta


def test_a_delta_names_its_base_and_the_digest_of_the_whole_version() -> None:
    base, snapshot = a_snapshot(4), a_snapshot(7, 3)
    delta = a_delta(base, snapshot)
    manifest = delta.manifest
    assert (manifest.kind, manifest.base_version, manifest.policy_version) == ("delta", 4, 7)
    assert manifest.digest == snapshot.manifest.digest
    assert manifest.tensors == []
    (bucket,) = manifest.buckets
    # Only the changed tensor is in it.
    assert (bucket.offset, bucket.num_elements, bucket.num_changed) == (8192, 4096, 3)
    assert manifest.num_bytes == len(delta.data) == 1 + 32 + 16 + sum(bucket.stream_bytes)
    assert manifest.num_bytes < 100


def test_equal_versions_have_an_empty_delta() -> None:
    delta = a_delta(a_snapshot(4), a_snapshot(7))
    assert delta.manifest.buckets == []
    assert delta.data.tobytes() == b"\0"


@pytest.mark.parametrize("change", ["name", "shape", "dtype", "number", "order"])
def test_versions_of_another_layout_have_no_delta(change: str) -> None:
    tensors = {"first": torch.zeros(4, 2), "second": torch.ones(4, 2)}
    other = {
        "name": {"first": torch.zeros(4, 2), "third": torch.ones(4, 2)},
        "shape": {"first": torch.zeros(2, 4), "second": torch.ones(4, 2)},
        "dtype": {"first": torch.zeros(4, 2, dtype=torch.float16), "second": torch.ones(4, 2)},
        "number": {"first": torch.zeros(4, 2)},
        "order": {"second": torch.ones(4, 2), "first": torch.zeros(4, 2)},
    }[change]
    assert encode_delta(snapshot_of(1, tensors.items()), snapshot_of(2, tensors.items())) is not None
    assert encode_delta(snapshot_of(1, tensors.items()), snapshot_of(2, other.items())) is None


def test_a_delta_that_would_not_pay_is_not_made() -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(50_000, generator=generator) for _ in range(2))
    assert encode_delta(snapshot_of(1, [("w", one)]), snapshot_of(2, [("w", other)])) is None
    half = one.clone()
    half[:25_000] = other[:25_000]
    delta = encode_delta(snapshot_of(1, [("w", one)]), snapshot_of(2, [("w", half)]))
    assert delta is not None
    assert delta.manifest.num_bytes < WORTHWHILE * 200_000


def test_a_part_that_changes_everywhere_does_not_decide_for_the_rest() -> None:
    generator = torch.Generator().manual_seed(0)
    number = 3 * MAX_DELTA_BUCKET_ELEMENTS
    before = torch.zeros(number, dtype=torch.bfloat16)
    after = before.clone()
    after[:100_000] = torch.randn(100_000, generator=generator).to(torch.bfloat16)
    delta = a_delta(snapshot_of(1, [("w", before)]), snapshot_of(2, [("w", after)]))
    assert [bucket.offset for bucket in delta.manifest.buckets] == [0]


def test_small_parts_that_change_everywhere_do_not_decide_for_a_large_one() -> None:
    generator = torch.Generator().manual_seed(0)
    before, after = {}, {}
    for part in range(12):
        # Unchanged tensors lie between them, so that each is a place of its own.
        before[f"still{part}"] = after[f"still{part}"] = torch.zeros(1)
        before[f"small{part}"], after[f"small{part}"] = (torch.randn(16 * 1024, generator=generator) for _ in range(2))
    before["still"] = after["still"] = torch.zeros(1)
    before["large"] = torch.randn(1024 * 1024, generator=generator)
    after["large"] = before["large"].clone()
    after["large"][::1000] += 1
    delta = a_delta(snapshot_of(1, before.items()), snapshot_of(2, after.items()))
    assert len(delta.manifest.buckets) == 13
    assert delta.manifest.num_bytes < 0.2 * 4 * (12 * 16 + 1024) * 1024


def a_place(offset: int, num_elements: int, item_bytes: int) -> ComparedRegion:
    """A place whose elements take no memory."""
    elements = np.broadcast_to(np.uint16(0), num_elements)
    return ComparedRegion(Region(offset=offset, num_elements=num_elements, item_bytes=item_bytes), elements, elements)


def test_a_delta_is_not_made_when_it_does_not_pay_outside_the_sample() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = [torch.randint(-(2**31), 2**31, (2 * 1024 * 1024,), dtype=torch.int32, generator=generator) for _ in range(2)]
    one, other = (each.view(torch.float32) for each in bits)
    for piece in samples([a_place(0, len(one), 4)])[0][1]:
        begin = piece.region.offset // 4
        other[begin : begin + len(piece.after)] = one[begin : begin + len(piece.after)]
    assert encode_delta(snapshot_of(1, [("w", one)]), snapshot_of(2, [("w", other)])) is None


@pytest.mark.parametrize(("num_places", "num_pieces"), [(1, 16), (3, 18), (16, 16), (31, 31), (1000, 17)])
def test_the_sample_that_shows_whether_a_delta_pays_is_small_and_from_everywhere(num_places: int, num_pieces: int) -> None:
    elements = MAX_DELTA_BUCKET_ELEMENTS
    chosen = samples([a_place(place * elements * 2, elements, 2) for place in range(num_places)])
    assert all(len(piece.before) == len(piece.after) == 16 * 1024 for _, several in chosen for piece in several)
    regions = [(place.region, [piece.region for piece in several]) for place, several in chosen]
    pieces = [piece for _, several in regions for piece in several]
    assert len(pieces) == num_pieces
    assert {piece.num_elements for piece in pieces} == {16 * 1024}
    assert all(place.offset <= piece.offset < place.offset + 2 * elements for place, several in regions for piece in several)
    last = num_places * elements * 2
    steps = [after.offset - before.offset for before, after in pairwise(pieces)]
    assert 0 < min(steps) <= max(steps) <= last / 15
    assert last - pieces[-1].offset <= last / 15


def test_a_place_smaller_than_a_piece_is_sampled_whole() -> None:
    place = a_place(6, 5, 2)
    ((_, pieces),) = samples([place])
    assert [piece.region for piece in pieces] == [place.region] * 16
    assert samples([]) == []


# --- deltas kept and offered ------------------------------------------------------------------------------------------


def a_store(*versions: int, without: int = 0, **limits: float) -> SnapshotStore:
    """Each version is published with its delta, except ``without``."""
    store = SnapshotStore(**limits)  # type: ignore[arg-type]
    for version in versions:
        snapshot, newest = a_snapshot(version, 10), store.newest
        store.add(snapshot, None if newest is None or version == without else a_delta(newest, snapshot))
    return store


def offered(store: SnapshotStore, have_version: int) -> tuple[str, int, int, int]:
    manifest = store.manifest_for(have_version)
    assert manifest is not None
    return manifest.kind, manifest.base_version, manifest.policy_version, manifest.newest_version


def test_a_peer_with_the_former_version_is_offered_the_delta_and_a_newcomer_the_snapshot() -> None:
    assert SnapshotStore().manifest_for(0) is None
    store = a_store(3, 4)
    assert offered(store, 3) == ("delta", 3, 4, 0)
    assert offered(store, 0) == ("snapshot", 0, 4, 0)
    assert offered(store, 2) == ("snapshot", 0, 4, 0)


def test_a_peer_that_skipped_versions_is_led_along_the_chain() -> None:
    store = a_store(3, 4, 6, 7)
    assert offered(store, 3) == ("delta", 3, 4, 7)
    assert offered(store, 4) == ("delta", 4, 6, 7)
    assert offered(store, 6) == ("delta", 6, 7, 0)
    assert store.get(4, 3) is not None
    assert store.get(6, 3) is None


def test_a_chain_that_is_larger_than_the_snapshot_is_not_offered() -> None:
    store = SnapshotStore(delta_share=100)
    generator = np.random.default_rng(0)
    weight = torch.zeros(3000, dtype=torch.bfloat16)
    for version in range(1, 4):
        weight = weight.clone()
        weight[generator.permutation(3000)[:1800]] = torch.from_numpy(generator.standard_normal(1800)).to(torch.bfloat16)
        snapshot, newest = snapshot_of(version, [("w", weight)]), store.newest
        store.add(snapshot, None if newest is None else a_delta(newest, snapshot))
    sizes = [parts.manifest.num_bytes for base in (1, 2) if (parts := store.get(base + 1, base))]
    assert max(sizes) < 6000 < sum(sizes)
    assert offered(store, 1) == ("snapshot", 0, 3, 0)
    assert offered(store, 2) == ("delta", 2, 3, 0)


def test_before_the_next_version_is_copied_the_older_snapshot_goes_and_its_delta_stays() -> None:
    store = a_store(3)
    store.fetches(b"slow", 3)
    store.add(a_snapshot(4, 10), a_delta(a_snapshot(3, 10), a_snapshot(4, 10)))
    assert store.snapshot(3) is not None, "a fetch under way survives one publication"
    store.make_room()
    assert (store.snapshot(3), store.snapshot(4)) == (None, store.newest)
    assert offered(store, 3) == ("delta", 3, 4, 0)
    store.make_room()
    assert store.newest is not None, "what is served stays"


def test_an_older_snapshot_stays_for_those_that_fetch_it_and_no_longer() -> None:
    store = a_store(3)
    assert a_store(3, 4).snapshot(3) is None, "nobody fetches it"
    for peer in (b"a", b"b", b"c"):
        store.fetches(peer, 3)
    store.add(a_snapshot(4, 10))
    store.has_fetched(b"a")
    store.fetches(b"b", 4)
    store.has_fetched(b"unknown")
    assert store.snapshot(3) is not None
    store.has_fetched(b"c")
    assert (store.snapshot(3), store.snapshot(4)) == (None, store.newest)
    store.fetches(b"gone", 4)
    for version in (5, 6):
        store.add(a_snapshot(version, 10))
    assert (store.snapshot(4), store.snapshot(5)) == (None, None), "a peer that has ended holds nothing for good"


def test_a_publication_without_a_delta_breaks_the_chain() -> None:
    store = a_store(3, 4, 5, 6, without=5)
    assert offered(store, 3) == ("snapshot", 0, 6, 0)
    assert offered(store, 4) == ("snapshot", 0, 6, 0)
    assert offered(store, 5) == ("delta", 5, 6, 0)


@pytest.mark.parametrize("limits", [{"max_deltas": 2}, {"delta_share": 0.018}])
def test_old_deltas_are_dropped_when_they_are_many_or_large(limits: dict[str, float]) -> None:
    store = a_store(1, 2, 3, 4, 5, **limits)
    sizes = [parts.manifest.num_bytes for base in range(1, 5) if (parts := store.get(base + 1, base))]
    assert len(sizes) == 2
    assert sum(sizes) <= 0.018 * 16384 < sum(sizes) + sizes[0]
    assert offered(store, 2) == ("snapshot", 0, 5, 0)
    assert offered(store, 3) == ("delta", 3, 4, 5)


def test_a_delta_of_other_versions_is_refused() -> None:
    store = a_store(3)
    with pytest.raises(ValueError, match="delta 2 -> 4 does not fit a publication of 4 after 3"):
        store.add(a_snapshot(4), a_delta(a_snapshot(2), a_snapshot(4)))
    with pytest.raises(ValueError, match="delta 3 -> 5 does not fit a publication of 4 after 3"):
        store.add(a_snapshot(4), a_delta(a_snapshot(3), a_snapshot(5)))

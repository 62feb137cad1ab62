"""A policy version as it is served: the bytes of all tensors, one after the other, each with a digest."""

import os
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
from msgspec import structs

from gspo_protocol.digests import version_digest
from gspo_protocol.limits import MAX_WEIGHT_CHUNK_BYTES
from gspo_protocol.messages import Manifest
from gspo_services.learner.weights.weight_copy import CopiedTensor, WeightCopy, described
from gspo_services.shared.weights import Parts

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class SnapshotMemory:
    """Keeps one snapshot's memory for the next one, once nobody reads it any more."""

    def __init__(self) -> None:
        self._spare: list[Bytes] = []

    def take(self, num_bytes: int) -> Bytes:
        """Return uint8 [num_bytes] with any content. It comes back by itself, when no array and no view of it is left."""
        memory = self._spare.pop() if self._spare else None
        if memory is None or memory.nbytes != num_bytes:
            memory = np.empty(num_bytes, dtype=np.uint8)
        # All views of what is returned refer to this array, and not to the memory itself.
        lent = memory[:]
        weakref.finalize(lent, self._give_back, memory).atexit = False
        return np.frombuffer(lent.data, dtype=np.uint8)

    def _give_back(self, memory: Bytes) -> None:
        self._spare[:] = [memory]


CHUNK_BYTES: Final = MAX_WEIGHT_CHUNK_BYTES
COPY_BYTES: Final = 16 * 2**20
"""What one thread copies at a time: one tensor can be a sixth of a model."""


class Snapshot(Parts):
    """One full policy version: all tensors in the manifest's order."""

    def tensor_data(self) -> list[memoryview]:
        """Return the bytes of each tensor."""
        data = self.data.data
        return [data[each.offset : each.offset + each.num_bytes] for each in self.manifest.tensors]


class Delta(Parts):
    """One policy version as its changes against ``manifest.base_version`` (gspo_services.learner.weights.delta)."""


def build_snapshot(policy_version: int, weights: WeightCopy, memory: SnapshotMemory | None = None) -> Snapshot:
    """Make a snapshot of ``weights`` and use them up: their memory is freed while the snapshot fills. Uses all cores.

    ``memory``: where the snapshot's comes from; None: memory of its own. Raises: ValueError when there are no weights.
    """
    if not weights.tensors:
        raise ValueError(f"policy version {policy_version} has no tensors")
    tensors = described(weights.tensors, weights.digests())
    data = (SnapshotMemory() if memory is None else memory).take(sum(tensor.num_bytes for tensor in tensors))
    _fill(data, weights.take())
    manifest = Manifest(
        policy_version=policy_version,
        kind="snapshot",
        base_version=0,
        num_bytes=data.nbytes,
        chunk_bytes=CHUNK_BYTES,
        digest=version_digest(tensors, weights.adapter),
        tensors=tensors,
        adapter=weights.adapter,
    )
    return Snapshot(manifest=manifest, data=data)


def _fill(data: Bytes, tensors: list[CopiedTensor]) -> None:
    """Write tensors end to end, and drop each once it is written."""
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for _ in pool.map(_write, _pieces(data, tensors)):
            pass


def _write(piece: tuple[Bytes, Bytes]) -> None:
    np.copyto(*piece)


def _pieces(data: Bytes, tensors: list[CopiedTensor]) -> Iterator[tuple[Bytes, Bytes]]:
    """Where each piece goes, and what it is; uses up ``tensors``."""
    tensors.reverse()
    offset = 0
    while tensors:
        source = tensors.pop().data
        target = data[offset : offset + len(source)]
        offset += len(source)
        for begin in range(0, len(source), COPY_BYTES):
            yield target[begin : begin + COPY_BYTES], source[begin : begin + COPY_BYTES]


class SnapshotStore:
    """The learner's served versions: the newest snapshots, and the deltas that form a chain to the newest version.

    Holds the newest snapshot, and an older one while somebody fetches it: ``keep`` in all, so that a fetch under way
    survives one publication. Holds at most ``max_deltas`` deltas that together are no larger than ``delta_share`` of the
    newest snapshot.
    """

    def __init__(self, keep: int = 2, *, max_deltas: int = 64, delta_share: float = 0.5) -> None:
        self._keep = keep
        self._max_deltas = max_deltas
        self._delta_share = delta_share
        self._snapshots: OrderedDict[int, Snapshot] = OrderedDict()
        self._fetched: dict[bytes, int] = {}
        """The version that each peer is fetching."""
        # By base, oldest first; each delta's base is the version of the one before.
        self._deltas: OrderedDict[int, Delta] = OrderedDict()

    @property
    def newest(self) -> Snapshot | None:
        return next(reversed(self._snapshots.values())) if self._snapshots else None

    def get(self, policy_version: int, base_version: int = 0) -> Parts | None:
        """Return the snapshot of a version, or its delta against ``base_version``; None: not stored (any more)."""
        if not base_version:
            return self._snapshots.get(policy_version)
        delta = self._deltas.get(base_version)
        return delta if delta is not None and delta.policy_version == policy_version else None

    def snapshot(self, policy_version: int) -> Snapshot | None:
        """Return the snapshot of a version; None: not stored (any more)."""
        return self._snapshots.get(policy_version)

    def manifest_for(self, have_version: int) -> Manifest | None:
        """Return what a peer with ``have_version`` should fetch next; None: the store is empty.

        A delta, if a chain of deltas from there to the newest version has fewer bytes than its snapshot; otherwise that
        snapshot.
        """
        newest = self.newest
        if newest is None:
            return None
        version, num_bytes = have_version, 0
        while version in self._deltas:
            num_bytes += self._deltas[version].manifest.num_bytes
            version = self._deltas[version].policy_version
        if version == have_version or num_bytes >= newest.manifest.num_bytes:
            return newest.manifest
        first = self._deltas[have_version].manifest
        return first if first.policy_version == version else structs.replace(first, newest_version=version)

    def add(self, snapshot: Snapshot, delta: Delta | None = None) -> None:
        """Add ``snapshot`` as the newest; ``delta`` is against the one before (None: no delta).

        Raises: ValueError when its version is not newer, or the delta is between other versions.
        """
        newest = self.newest
        if newest is not None and snapshot.policy_version <= newest.policy_version:
            raise ValueError(
                f"policy version {snapshot.policy_version} after {newest.policy_version}: versions grow and are never reused"
            )
        if delta is None:
            self._deltas.clear()  # They no longer lead to the newest version.
        else:
            base_version = 0 if newest is None else newest.policy_version
            if (delta.manifest.base_version, delta.policy_version) != (base_version, snapshot.policy_version):
                raise ValueError(
                    f"delta {delta.manifest.base_version} -> {delta.policy_version} does not fit a publication of "
                    f"{snapshot.policy_version} after {base_version}"
                )
            self._deltas[base_version] = delta
        self._snapshots[snapshot.policy_version] = snapshot
        self._drop_to(self._keep)
        self._let_go()
        budget = self._delta_share * snapshot.manifest.num_bytes
        while len(self._deltas) > 1 and (len(self._deltas) > self._max_deltas or self._delta_bytes > budget):
            self._deltas.popitem(last=False)

    def fetches(self, peer: bytes, policy_version: int) -> None:
        """``peer`` begins to fetch a version, whose snapshot stays for it, and no other."""
        self._fetched[peer] = policy_version
        self._let_go()

    def has_fetched(self, peer: bytes) -> None:
        """``peer`` needs no more of what it fetched."""
        if self._fetched.pop(peer, None) is not None:
            self._let_go()

    def make_room(self) -> None:
        """Let go of the snapshot that the next publication will push out: so there is never one more than ``keep``."""
        self._drop_to(self._keep - 1)

    def _drop_to(self, number: int) -> None:
        while len(self._snapshots) > number:
            self._snapshots.popitem(last=False)
        # A peer that has ended says nothing: what it fetched is forgotten with the version.
        self._fetched = {peer: version for peer, version in self._fetched.items() if version in self._snapshots}

    def _let_go(self) -> None:
        wanted = {next(reversed(self._snapshots), 0), *self._fetched.values()}
        for version in [version for version in self._snapshots if version not in wanted]:
            del self._snapshots[version]

    @property
    def _delta_bytes(self) -> int:
        return sum(delta.manifest.num_bytes for delta in self._deltas.values())

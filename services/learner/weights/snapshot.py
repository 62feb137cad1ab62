"""A policy version as it is served: the bytes of all tensors, each with a digest, or one rank's part of them."""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

import numpy as np
from msgspec import structs

from gspo_protocol.digests import version_digest
from gspo_protocol.limits import MAX_WEIGHT_CHUNK_BYTES
from gspo_protocol.messages import Manifest, WeightPart
from gspo_protocol.tiles import Sums
from gspo_services.learner.weights.copy_memory import Bytes
from gspo_services.learner.weights.weight_copy import WeightCopy
from gspo_services.shared.weights import Parts, StoredParts

CHUNK_BYTES: Final = MAX_WEIGHT_CHUNK_BYTES
OF_A_PART: Final = "a part"
"""In place of a digest, in manifests that are never sent."""


@dataclass(frozen=True, kw_only=True)
class Snapshot(Parts):
    """One full policy version, or one rank's part of it, in the memory to which it was copied."""

    weights: WeightCopy
    starts: Sequence[int] = field(init=False)
    """Where each piece begins in what is served here: the pieces, end to end."""

    def __post_init__(self) -> None:
        starts = list(accumulate((len(piece.data) for piece in self.weights.pieces), initial=0))
        object.__setattr__(self, "starts", starts)

    @property
    def num_bytes(self) -> int:
        return self.starts[-1]

    def read(self, begin: int, end: int) -> Bytes:
        """A copy only where pieces meet."""
        found: list[Bytes] = []
        at = max(0, bisect_right(self.starts, begin) - 1)
        while begin < end:
            part = self.weights.pieces[at].data[begin - self.starts[at] : end - self.starts[at]]
            found.append(part)
            begin, at = begin + len(part), at + 1
        return found[0] if len(found) == 1 else np.concatenate(found or [np.empty(0, dtype=np.uint8)])

    def tensor_data(self) -> list[memoryview]:
        """Return the bytes of each tensor, of a whole version."""
        return [self.read(info.offset, info.offset + info.num_bytes).data for info in self.manifest.tensors]


class Delta(StoredParts):
    """One policy version as its changes against ``manifest.base_version`` (gspo_services.learner.weights.delta)."""


def build_snapshot(policy_version: int, weights: WeightCopy) -> Snapshot:
    """Make a version of whole ``weights``. Uses all cores. Raises: ValueError when there are no weights."""
    return made_snapshot(policy_version, weights, weights.row())


def made_snapshot(policy_version: int, weights: WeightCopy, row: Sums, parts: Sequence[WeightPart] = ()) -> Snapshot:
    """Make a version from one rank's ``weights`` and the sums of all of its tiles. ``parts``: see ``Manifest``.

    Raises: ValueError when there are no weights.
    """
    tensors = weights.layout.described(row)
    if not tensors:
        raise ValueError(f"policy version {policy_version} has no tensors")
    manifest = Manifest(
        policy_version=policy_version,
        kind="snapshot",
        base_version=0,
        num_bytes=weights.layout.num_bytes,
        chunk_bytes=CHUNK_BYTES,
        digest=version_digest(tensors, weights.adapter),
        tensors=tensors,
        adapter=weights.adapter,
        parts=list(parts),
        probe=weights.probe,
    )
    return Snapshot(manifest=manifest, weights=weights)


def part_snapshot(policy_version: int, weights: WeightCopy) -> Snapshot:
    """Make one rank's part of a version, which rank 0 describes. It needs no digests."""
    num_bytes = sum(len(piece.data) for piece in weights.pieces)
    return Snapshot(manifest=_part_manifest(policy_version, 0, num_bytes), weights=weights)


def part_delta(base: Snapshot, snapshot: Snapshot, data: bytes) -> Delta:
    """Make one rank's part of the delta between two versions."""
    manifest = _part_manifest(snapshot.policy_version, base.policy_version, len(data))
    return Delta(manifest=manifest, data=np.frombuffer(data, dtype=np.uint8))


def _part_manifest(policy_version: int, base_version: int, num_bytes: int) -> Manifest:
    return Manifest(
        policy_version=policy_version,
        kind="delta" if base_version else "snapshot",
        base_version=base_version,
        num_bytes=num_bytes,
        chunk_bytes=CHUNK_BYTES,
        digest=OF_A_PART,
        tensors=[],
    )


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

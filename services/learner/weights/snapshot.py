"""A policy version as it is served: the bytes of all tensors, one after the other, each with a digest."""

import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from msgspec import structs

from protocol.digests import tensor_digest, version_digest
from protocol.limits import MAX_WEIGHT_CHUNK_BYTES
from protocol.messages import Manifest, TensorInfo
from services.weights import Parts

CHUNK_BYTES: Final = MAX_WEIGHT_CHUNK_BYTES
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""By their names on the wire and in the settings."""
DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


class Snapshot(Parts):
    """One full policy version: all tensors in the manifest's order."""

    def tensor_data(self) -> list[memoryview]:
        """The bytes of each tensor."""
        data = self.data.data
        return [data[each.offset : each.offset + each.num_bytes] for each in self.manifest.tensors]


class Delta(Parts):
    """One policy version as its changes against ``manifest.base_version`` (services.learner.weights.delta)."""


@dataclass(frozen=True, kw_only=True)
class CopiedTensor:
    """One tensor's bytes in this process's own memory."""

    name: str
    dtype: str
    shape: list[int]
    data: np.ndarray[Any, np.dtype[np.uint8]]


class WeightCopy:
    """The weights of one moment, copied to the CPU: training may continue, and change the originals."""

    def __init__(self, tensors: list[CopiedTensor]) -> None:
        self.tensors = tensors
        self._digests: list[str] = []

    @property
    def num_bytes(self) -> int:
        return sum(tensor.data.nbytes for tensor in self.tensors)

    def digests(self) -> list[str]:
        """The digest of every tensor, in order. Uses all cores: hashing is the slowest part of a publication."""
        if not self._digests:
            with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
                self._digests = list(pool.map(tensor_digest, [tensor.data.data for tensor in self.tensors]))
        return self._digests

    def digest(self) -> str:
        """The digest that a version of these weights has."""
        return version_digest(_described(self.tensors, self.digests()))


def copy_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> WeightCopy:
    """Copy ``weights`` (name in the serving layout, tensor on any device). Training waits only for this.

    Raises: ValueError when a dtype cannot be sent.
    """
    copied: list[CopiedTensor] = []
    for name, tensor in weights:
        if tensor.dtype not in DTYPE_NAMES:
            raise ValueError(f"tensor {name} has dtype {tensor.dtype}: one of {sorted(DTYPE_NAMES.values())} can be served")
        # Copied on the CPU too: the tensor may be a buffer that is filled again for the next one.
        own = tensor.detach().contiguous().to("cpu", copy=True).reshape(-1).view(torch.uint8)
        copied.append(CopiedTensor(name=name, dtype=DTYPE_NAMES[tensor.dtype], shape=list(tensor.shape), data=own.numpy()))
    return WeightCopy(copied)


def build_snapshot(policy_version: int, weights: WeightCopy) -> Snapshot:
    """Make a snapshot of ``weights`` and use them up: their memory moves into the snapshot, tensor by tensor.

    Raises: ValueError when there are no weights.
    """
    if not weights.tensors:
        raise ValueError(f"policy version {policy_version} has no tensors")
    tensors = _described(weights.tensors, weights.digests())
    data = np.empty(weights.num_bytes, dtype=np.uint8)
    copied, weights.tensors = weights.tensors[::-1], []
    for described in tensors:
        data[described.offset : described.offset + described.num_bytes] = copied.pop().data
    manifest = Manifest(
        policy_version=policy_version,
        kind="snapshot",
        base_version=0,
        num_bytes=data.nbytes,
        chunk_bytes=CHUNK_BYTES,
        digest=version_digest(tensors),
        tensors=tensors,
    )
    return Snapshot(manifest=manifest, data=data)


def _described(tensors: Sequence[CopiedTensor], digests: Sequence[str]) -> list[TensorInfo]:
    described: list[TensorInfo] = []
    offset = 0
    for tensor, digest in zip(tensors, digests, strict=True):
        described.append(
            TensorInfo(
                name=tensor.name,
                dtype=tensor.dtype,  # type: ignore[arg-type]
                shape=tensor.shape,
                offset=offset,
                num_bytes=tensor.data.nbytes,
                digest=digest,
            )
        )
        offset += tensor.data.nbytes
    return described


class SnapshotStore:
    """What the learner serves: the newest snapshots, and the deltas that form a chain to the newest version.

    Holds ``keep`` snapshots, so that a fetch under way survives one publication, and at most ``max_deltas`` deltas that
    together are no larger than ``delta_share`` of the newest snapshot. During a publication there is one snapshot more.
    """

    def __init__(self, keep: int = 2, *, max_deltas: int = 64, delta_share: float = 0.5) -> None:
        self._keep = keep
        self._max_deltas = max_deltas
        self._delta_share = delta_share
        self._snapshots: OrderedDict[int, Snapshot] = OrderedDict()
        # By base, oldest first; each delta's base is the version of the one before.
        self._deltas: OrderedDict[int, Delta] = OrderedDict()

    @property
    def newest(self) -> Snapshot | None:
        return next(reversed(self._snapshots.values())) if self._snapshots else None

    def get(self, policy_version: int, base_version: int = 0) -> Parts | None:
        """The snapshot of a version, or its delta against ``base_version``; None: not stored (any more)."""
        if not base_version:
            return self._snapshots.get(policy_version)
        delta = self._deltas.get(base_version)
        return delta if delta is not None and delta.policy_version == policy_version else None

    def snapshot(self, policy_version: int) -> Snapshot | None:
        """The snapshot of a version; None: not stored (any more)."""
        return self._snapshots.get(policy_version)

    def manifest_for(self, have_version: int) -> Manifest | None:
        """What a peer that has ``have_version`` should fetch next; None: the store is empty.

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
        """Add ``snapshot`` as the newest; ``delta`` is against the one before (None: there is no such delta).

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
                    f"delta {delta.manifest.base_version} -> {delta.policy_version} beside a publication of "
                    f"{snapshot.policy_version} after {base_version}"
                )
            self._deltas[base_version] = delta
        self._snapshots[snapshot.policy_version] = snapshot
        while len(self._snapshots) > self._keep:
            self._snapshots.popitem(last=False)
        budget = self._delta_share * snapshot.manifest.num_bytes
        while len(self._deltas) > 1 and (len(self._deltas) > self._max_deltas or self._delta_bytes > budget):
            self._deltas.popitem(last=False)

    @property
    def _delta_bytes(self) -> int:
        return sum(delta.manifest.num_bytes for delta in self._deltas.values())

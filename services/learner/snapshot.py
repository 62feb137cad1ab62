"""A policy version as it is served: all tensors' bytes, one behind the other, with a digest each."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from protocol.digests import tensor_digest, version_digest
from protocol.limits import MAX_WEIGHT_CHUNK_BYTES
from protocol.messages import Manifest, TensorInfo

CHUNK_BYTES: Final = MAX_WEIGHT_CHUNK_BYTES
DTYPE_NAMES: Final = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One full policy version. ``data``: uint8 array of all tensors in the manifest's order; never written again."""

    manifest: Manifest
    data: np.ndarray[Any, np.dtype[np.uint8]]

    @property
    def policy_version(self) -> int:
        return self.manifest.policy_version

    @property
    def num_chunks(self) -> int:
        return -(-self.manifest.num_bytes // self.manifest.chunk_bytes)

    def chunk(self, index: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Bytes of chunk ``index``: uint8 [chunk_bytes], the last one shorter."""
        size = self.manifest.chunk_bytes
        return self.data[index * size : (index + 1) * size]


def build_snapshot(policy_version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> Snapshot:
    """Copy ``weights`` (name in the serving layout, tensor on any device) into a snapshot.

    Raises: ValueError for a dtype that the wire does not know, or no weights.
    """
    tensors: list[TensorInfo] = []
    parts: list[np.ndarray[Any, np.dtype[np.uint8]]] = []
    offset = 0
    for name, tensor in weights:
        if tensor.dtype not in DTYPE_NAMES:
            raise ValueError(f"tensor {name} has dtype {tensor.dtype}: one of {sorted(DTYPE_NAMES.values())} can be served")
        # A copy: the tensor may be a buffer that is filled again for the next one.
        part = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().copy()
        tensors.append(
            TensorInfo(
                name=name,
                dtype=DTYPE_NAMES[tensor.dtype],  # type: ignore[arg-type]
                shape=list(tensor.shape),
                offset=offset,
                num_bytes=part.nbytes,
                digest=tensor_digest(part.data),
            )
        )
        parts.append(part)
        offset += part.nbytes
    if not tensors:
        raise ValueError(f"policy version {policy_version} has no tensors")
    manifest = Manifest(
        policy_version=policy_version,
        kind="snapshot",
        base_version=0,
        num_bytes=offset,
        chunk_bytes=CHUNK_BYTES,
        digest=version_digest(tensors),
        tensors=tensors,
    )
    return Snapshot(manifest=manifest, data=np.concatenate(parts))


class SnapshotStore:
    """The newest snapshots, by version; a fetch under way survives one publication."""

    def __init__(self, keep: int = 2) -> None:
        self._keep = keep
        self._snapshots: OrderedDict[int, Snapshot] = OrderedDict()

    @property
    def newest(self) -> Snapshot | None:
        return next(reversed(self._snapshots.values())) if self._snapshots else None

    def get(self, policy_version: int) -> Snapshot | None:
        return self._snapshots.get(policy_version)

    def add(self, snapshot: Snapshot) -> None:
        """Hold ``snapshot`` as the newest. Raises: ValueError when its version does not grow."""
        newest = self.newest
        if newest is not None and snapshot.policy_version <= newest.policy_version:
            raise ValueError(
                f"policy version {snapshot.policy_version} after {newest.policy_version}: versions grow and are never reused"
            )
        self._snapshots[snapshot.policy_version] = snapshot
        while len(self._snapshots) > self._keep:
            self._snapshots.popitem(last=False)

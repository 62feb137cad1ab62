"""Snapshots without a learner, and their bytes."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from gspo_protocol.messages import Manifest
from gspo_services.learner.weights.snapshot import Snapshot, build_snapshot
from gspo_services.learner.weights.version_layout import VersionLayout
from gspo_services.learner.weights.weight_copy import CopiedRange, WeightCopy, copy_weights


def snapshot_from(manifest: Manifest, data: np.ndarray[Any, np.dtype[np.uint8]]) -> Snapshot:
    """A version from its bytes."""
    pieces = [
        CopiedRange(info.offset, data[info.offset : info.offset + info.num_bytes])
        for info in manifest.tensors
        if info.num_bytes
    ]
    return Snapshot(manifest=manifest, weights=WeightCopy(VersionLayout(manifest.tensors), pieces))


def bytes_of(snapshot: Snapshot) -> bytes:
    """All bytes of a version in a row."""
    return snapshot.read(0, snapshot.manifest.num_bytes).tobytes()


def snapshot_of(policy_version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> Snapshot:
    """Copy ``weights`` and build a snapshot of the copy."""
    return build_snapshot(policy_version, copy_weights(weights))

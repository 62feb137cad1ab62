"""Snapshots without a learner, and their bytes."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from gspo.model.serving_layout import ServedPart
from gspo_protocol.deltas import ITEM_BYTES
from gspo_protocol.messages import Manifest
from gspo_services.learner.weights.snapshot import Snapshot, build_snapshot
from gspo_services.learner.weights.weight_copy import CopiedParameter, copy_weights


def snapshot_from(manifest: Manifest, data: np.ndarray[Any, np.dtype[np.uint8]]) -> Snapshot:
    """A version from its bytes."""
    pieces = [
        CopiedParameter(
            data=data[info.offset : info.offset + info.num_bytes],
            item_bytes=ITEM_BYTES[info.dtype],
            dtype=info.dtype,
            tensors=[ServedPart(info.name, tuple(info.shape), 0)],
        )
        for info in manifest.tensors
    ]
    return Snapshot(manifest=manifest, pieces=pieces)


def bytes_of(snapshot: Snapshot) -> bytes:
    """All bytes of a version in a row."""
    return snapshot.read(0, snapshot.manifest.num_bytes).tobytes()


def snapshot_of(policy_version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> Snapshot:
    """Copy ``weights`` and build a snapshot of the copy."""
    return build_snapshot(policy_version, copy_weights(weights))

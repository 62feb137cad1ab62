"""A snapshot from tensors, without a learner."""

from collections.abc import Iterable

import torch

from gspo_services.learner.weights.snapshot import Snapshot, build_snapshot
from gspo_services.learner.weights.weight_copy import copy_weights


def snapshot_of(policy_version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> Snapshot:
    """Copy ``weights`` and build a snapshot of the copy."""
    return build_snapshot(policy_version, copy_weights(weights))

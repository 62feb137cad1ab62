"""The learner's end of a weight update: snapshots, deltas and the server that sends them."""

from gspo_services.learner.weights.adapter_copy import AdapterCopy, PublishedBase, copy_adapter
from gspo_services.learner.weights.composed import composed
from gspo_services.learner.weights.delta import EncodedBucket, encode_changes, encode_delta
from gspo_services.learner.weights.other_ranks import OtherRanks
from gspo_services.learner.weights.snapshot import (
    Delta,
    Snapshot,
    SnapshotStore,
    build_snapshot,
    part_delta,
    part_snapshot,
)
from gspo_services.learner.weights.version_copies import VersionCopies
from gspo_services.learner.weights.version_layout import VersionLayout
from gspo_services.learner.weights.weight_copy import (
    DTYPE_NAMES,
    DTYPES,
    VersionRange,
    WeightCopy,
    copy_parameters,
    copy_weights,
    in_order,
    parts_in_order,
    served_dtype,
)
from gspo_services.learner.weights.weight_server import WeightServer

__all__ = [
    "DTYPES",
    "DTYPE_NAMES",
    "AdapterCopy",
    "Delta",
    "EncodedBucket",
    "OtherRanks",
    "PublishedBase",
    "Snapshot",
    "SnapshotStore",
    "VersionCopies",
    "VersionLayout",
    "VersionRange",
    "WeightCopy",
    "WeightServer",
    "build_snapshot",
    "composed",
    "copy_adapter",
    "copy_parameters",
    "copy_weights",
    "encode_changes",
    "encode_delta",
    "in_order",
    "part_delta",
    "part_snapshot",
    "parts_in_order",
    "served_dtype",
]

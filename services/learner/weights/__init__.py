"""The learner's end of a weight update: snapshots, deltas and the server that sends them."""

from gspo_services.learner.weights.adapter_copy import AdapterCopy, PublishedBase, copy_adapter
from gspo_services.learner.weights.delta import encode_delta
from gspo_services.learner.weights.snapshot import SnapshotStore, build_snapshot
from gspo_services.learner.weights.version_copies import VersionCopies
from gspo_services.learner.weights.weight_copy import DTYPE_NAMES, DTYPES, WeightCopy, copy_parameters, copy_weights
from gspo_services.learner.weights.weight_server import WeightServer

__all__ = [
    "DTYPES",
    "DTYPE_NAMES",
    "AdapterCopy",
    "PublishedBase",
    "SnapshotStore",
    "VersionCopies",
    "WeightCopy",
    "WeightServer",
    "build_snapshot",
    "copy_adapter",
    "copy_parameters",
    "copy_weights",
    "encode_delta",
]

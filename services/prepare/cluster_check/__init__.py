"""``gspo check --kubernetes``: rendered manifests, played through on a model of a cluster before a cluster has them."""

from gspo_services.prepare.cluster_check.checks import CHECKS, Check, faults_of
from gspo_services.prepare.cluster_check.command import check_cluster
from gspo_services.prepare.cluster_check.model import ClusterFault, ClusterModel, ManifestObject, Object, read_manifests
from gspo_services.prepare.cluster_check.schema import MAX_CONFIG_MAP_BYTES

__all__ = [
    "CHECKS",
    "MAX_CONFIG_MAP_BYTES",
    "Check",
    "ClusterFault",
    "ClusterModel",
    "ManifestObject",
    "Object",
    "check_cluster",
    "faults_of",
    "read_manifests",
]

"""``gspo check --kubernetes``: rendered manifests, played through on a model of a cluster before a cluster has them."""

from gspo_services.prepare.cluster_check.checks import CHECKS, Check, faults_of
from gspo_services.prepare.cluster_check.command import check_cluster
from gspo_services.prepare.cluster_check.model import ClusterFault, ClusterModel, ManifestObject, Object, read_manifests

__all__ = [
    "CHECKS",
    "Check",
    "ClusterFault",
    "ClusterModel",
    "ManifestObject",
    "Object",
    "check_cluster",
    "faults_of",
    "read_manifests",
]

"""What a user's check finds in manifests of ours."""

from gspo_services.prepare.cluster_check import ClusterFault, ClusterModel, faults_of
from tests.deploy.cluster import Object


def faults(objects: list[Object]) -> list[ClusterFault]:
    """All but that our overlays name no registry of anybody."""
    return [fault for fault in faults_of(ClusterModel.of(objects)) if "stands for your registry" not in fault.text]

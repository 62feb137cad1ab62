"""What a user's check finds in manifests of ours."""

from functools import cache

import yaml

from gspo_services.prepare.cluster_check import ClusterFault, ClusterModel, faults_of
from tests.deploy.cluster import K8S, Object

CRDS = K8S.parents[1] / "tests" / "deploy" / "crds"


@cache
def resources() -> tuple[Object, ...]:
    """The definitions of custom resources, as `kubectl get crds -o yaml` puts them beside the manifests."""
    kind = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition"}
    return tuple(
        {**kind, "metadata": {"name": path.stem}, **yaml.safe_load(path.read_text())} for path in sorted(CRDS.glob("*.yaml"))
    )


def faults(objects: list[Object]) -> list[ClusterFault]:
    """All but that our overlays name no registry of anybody."""
    found = faults_of(ClusterModel.of([*objects, *resources()]))
    return [fault for fault in found if "stands for your registry" not in fault.text]

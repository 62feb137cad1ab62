"""The nodes that pods may run on: those of `kubectl get nodes -o yaml` if they are in the set, else a usual cluster's."""

from dataclasses import dataclass
from typing import Final

from gspo_services.prepare.cluster_check.model.manifests import ClusterModel, PodTemplate
from gspo_services.prepare.cluster_check.model.objects import Object, at, items_at, matches, name_of, quantity_or_zero

GPU: Final = "nvidia.com/gpu"


@dataclass(frozen=True, kw_only=True)
class ClusterNode:
    """One node: what it has, and whom it keeps out."""

    name: str
    capacity: dict[str, float]
    taints: tuple[Object, ...] = ()
    labels: dict[str, str] | None = None
    """None: an assumed node, which has whatever label a pod asks for."""
    images: frozenset[str] = frozenset()


ASSUMED: Final = (
    ClusterNode(name="a node without GPUs", capacity={"cpu": 64.0, "memory": 256 * 2.0**30}),
    ClusterNode(
        name="a node with 8 GPUs",
        capacity={"cpu": 192.0, "memory": 2.0**41, GPU: 8.0},
        taints=({"key": GPU, "value": "present", "effect": "NoSchedule"},),
    ),
)
"""What is assumed of a cluster: 64 CPUs and 256 GiB; 192 CPUs, 2 TiB and 8 GPUs behind the plug-in's usual taint."""


def nodes_of(cluster: ClusterModel) -> tuple[ClusterNode, ...]:
    """The cluster's nodes."""
    found = [
        ClusterNode(
            name=name_of(item),
            capacity={key: quantity_or_zero(value) for key, value in at(item, "status", "allocatable").items()},
            taints=tuple(items_at(item, "spec", "taints")),
            labels=dict(at(item, "metadata", "labels")),
            images=frozenset(str(name) for image in items_at(item, "status", "images") for name in items_at(image, "names")),
        )
        for item in cluster.of_kind("Node")
    ]
    return tuple(found) or ASSUMED


def requests_of(pods: PodTemplate) -> dict[str, float]:
    """What the scheduler sets aside for one pod: its containers' sum, or more where an init container needs it."""
    needed: dict[str, float] = {}
    for container in pods.main:
        for key, value in _requests(container.data).items():
            needed[key] = needed.get(key, 0.0) + value
    for container in pods.containers:
        if container.place == "initContainers":
            for key, value in _requests(container.data).items():
                needed[key] = max(needed.get(key, 0.0), value)
    return needed


def _requests(container: Object) -> dict[str, float]:
    requests, limits = at(container, "resources", "requests"), at(container, "resources", "limits")
    return {key: quantity_or_zero(value) for key, value in {**limits, **requests}.items()}


def fits(pods: PodTemplate, node: ClusterNode) -> list[str]:
    """The resources that the pod asks for and the empty node does not have. Of what is assumed, only GPUs are counted."""
    lacking = []
    for key, value in requests_of(pods).items():
        unknown = node.labels is None and key not in node.capacity and key != GPU
        if value > node.capacity.get(key, 0.0) and not unknown:
            lacking.append(key)
    return lacking


def untolerated(pods: PodTemplate, node: ClusterNode) -> list[Object]:
    """The node's taints that keep the pod out."""
    return [
        taint
        for taint in node.taints
        if taint.get("effect") in ("NoSchedule", "NoExecute")
        and not any(tolerates(toleration, taint) for toleration in items_at(pods.spec, "tolerations"))
    ]


def tolerates(toleration: Object, taint: Object) -> bool:
    """Whether a toleration is for this taint."""
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if not toleration.get("key"):
        return toleration.get("operator") == "Exists"
    if toleration["key"] != taint.get("key"):
        return False
    return toleration.get("operator") == "Exists" or toleration.get("value", "") == taint.get("value", "")


def admits(pods: PodTemplate, node: ClusterNode) -> bool:
    """Whether the node's labels are those that the pod asks for."""
    if node.labels is None:
        return True
    if not matches(at(pods.spec, "nodeSelector"), node.labels):
        return False
    required = at(pods.spec, "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution")
    terms = items_at(required, "nodeSelectorTerms")
    return not terms or any(matches(term, node.labels) for term in terms)


def possible_nodes(pods: PodTemplate, nodes: tuple[ClusterNode, ...]) -> list[ClusterNode]:
    """The nodes on which a pod of this template could run, were they empty."""
    return [node for node in nodes if not untolerated(pods, node) and not fits(pods, node) and admits(pods, node)]

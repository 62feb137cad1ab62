"""Puts every pod on a node: taints, devices, memory, images, and volumes that are on one node only."""

from collections.abc import Iterator
from typing import Final

from gspo_services.prepare.cluster_check.model import (
    ClusterFault,
    ClusterModel,
    ClusterNode,
    PodTemplate,
    Way,
    at,
    fits,
    items_at,
    matches,
    name_of,
    namespace_of,
    nodes_of,
    possible_nodes,
    requests_of,
    untolerated,
)

HOSTNAME: Final = "kubernetes.io/hostname"
SHARED_MODES: Final = ("ReadWriteMany", "ReadOnlyMany")
WELL_KNOWN: Final = frozenset({
    "node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable", "node.kubernetes.io/out-of-service", "nvidia.com/gpu",
    "amd.com/gpu", "cloud.google.com/gke-spot", "cloud.google.com/gke-preemptible", "kubernetes.azure.com/scalesetpriority",
    "karpenter.sh/capacity-type", "karpenter.sh/disrupted", "eks.amazonaws.com/capacityType", "sku", "dedicated",
    "node-role.kubernetes.io/control-plane", "node.kubernetes.io/memory-pressure", "node.kubernetes.io/disk-pressure",
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region", "kubernetes.io/arch", "kubernetes.io/os", "node.kubernetes.io/instance-type",
    "nvidia.com/gpu.product", "nvidia.com/gpu.present", "nvidia.com/gpu.memory", "nvidia.com/gpu.count",
    "cloud.google.com/gke-accelerator", "cloud.google.com/gke-nodepool", "kubernetes.azure.com/accelerator", HOSTNAME,
})  # fmt: skip
"""Taints and labels of nodes that Kubernetes, its device plug-ins and the large clouds set."""


def places(cluster: ClusterModel) -> Iterator[ClusterFault]:
    """There is a node for every pod."""
    nodes = nodes_of(cluster)
    for pods in cluster.pods:
        if not possible_nodes(pods, nodes):
            yield from _no_place(pods, nodes)
        for index, toleration in enumerate(items_at(pods.spec, "tolerations")):
            yield from _known_key(cluster, pods, str(toleration.get("key", "")), ("tolerations", index, "key"))
        terms = items_at(pods.spec, "affinity", "nodeAffinity", "preferredDuringSchedulingIgnoredDuringExecution")
        for index, term in enumerate(terms):
            for number, expression in enumerate(items_at(term, "preference", "matchExpressions")):
                way = ("affinity", "nodeAffinity", "preferredDuringSchedulingIgnoredDuringExecution", index,
                       "preference", "matchExpressions", number, "key")  # fmt: skip
                yield from _known_key(cluster, pods, str(expression.get("key", "")), way)


def _no_place(pods: PodTemplate, nodes: tuple[ClusterNode, ...]) -> Iterator[ClusterFault]:
    """Why: what it asks for, else whom the nodes that have it keep out."""
    large = [node for node in nodes if not fits(pods, node)]
    if not large:
        nearest = min(nodes, key=lambda node: len(fits(pods, node)))
        key = fits(pods, nearest)[0]
        container = max(
            range(len(pods.main)), key=lambda index: str(at(pods.main[index].data, "resources", "requests", key))
        )
        yield ClusterFault(
            item=pods.owner,
            way=(*pods.main[container].way, "resources", "requests", key),
            text=f"needs {_amount(key, requests_of(pods)[key])} of {key}, and no node has that: {nearest.name} has "
            f"{_amount(key, nearest.capacity.get(key, 0))}; the pod stays Pending",
            way_out="ask for less (500m is half a processor), or add `kubectl get nodes -o yaml` of your larger nodes",
        )
        return
    taint = next((taint for node in large for taint in untolerated(pods, node)), None)
    if taint is not None:
        yield ClusterFault(
            item=pods.owner,
            way=(*pods.way, "spec", "tolerations"),
            text=f"only {large[0].name} has what it needs, and no toleration fits its taint "
            f"{taint.get('key')}:{taint.get('effect')}: the pod stays Pending",
            way_out=f"tolerate {{key: {taint.get('key')}, operator: Exists, effect: {taint.get('effect')}}}",
        )
    else:
        yield ClusterFault(
            item=pods.owner,
            way=(*pods.way, "spec", "affinity"),
            text="no node that is large enough has the labels that it asks for: the pod stays Pending",
            way_out="correct nodeSelector and nodeAffinity, or label the nodes",
        )


def _amount(key: str, value: float) -> str:
    return f"{value / 2**30:g} GiB" if key == "memory" else f"{value:g}"


def _known_key(cluster: ClusterModel, pods: PodTemplate, key: str, way: Way) -> Iterator[ClusterFault]:
    own = {str(taint.get("key")) for node in nodes_of(cluster) for taint in node.taints}
    own |= {label for node in nodes_of(cluster) for label in (node.labels or {})}
    if key and key not in WELL_KNOWN | own:
        yield ClusterFault(
            item=pods.owner,
            way=(*pods.way, "spec", *way),
            text=f"no cloud sets {key} on its nodes, and no node of the set has it: it has no effect",
            way_out="correct the key (cloud.google.com/gke-spot, karpenter.sh/capacity-type, ...), or add your nodes",
            status="warn",
        )


def images(cluster: ClusterModel) -> Iterator[ClusterFault]:
    """Every image can be had where its pod runs."""
    preloaded = {image for node in nodes_of(cluster) for image in node.images}
    for container in cluster.containers:
        if container.data.get("imagePullPolicy") == "Never" and str(container.data.get("image")) not in preloaded:
            yield ClusterFault(
                item=container.pods.owner,
                way=(*container.way, "imagePullPolicy"),
                text=f"Never: no node is known to have {container.data.get('image')}: the pod stays in ErrImageNeverPull",
                way_out="write IfNotPresent; with images that were loaded (kind load), add `kubectl get nodes -o yaml`",
            )


def host_ports(cluster: ClusterModel) -> Iterator[ClusterFault]:
    """No pod takes a port, or anything else, of its node."""
    for container in cluster.containers:
        for index, port in enumerate(items_at(container.data, "ports")):
            if "hostPort" in port:
                yield ClusterFault(
                    item=container.pods.owner,
                    way=(*container.way, "ports", index, "hostPort"),
                    text=f"takes port {port['hostPort']} of its node: one pod a node, over all runs; the restricted "
                    "standard refuses such pods",
                    way_out="remove hostPort: peers use the pod's own address",
                )


def shared_volumes(cluster: ClusterModel) -> Iterator[ClusterFault]:
    """Pods that share a volume of one node can be on one node together."""
    nodes = nodes_of(cluster)
    for claim in cluster.of_kind("PersistentVolumeClaim"):
        users = [user for user in cluster.users_of_claim(name_of(claim), namespace_of(claim)) if user[0].count != 0]
        modes = items_at(claim, "spec", "accessModes")
        several = len(users) > 1 or any(pods.count is None or pods.count > 1 for pods, _ in users)
        if set(SHARED_MODES) & set(modes) or not several or (len(nodes) == 1 and nodes[0].labels is not None):
            continue
        anchors = [pods for pods, _ in users if not _follows(pods, users)]
        if len(anchors) != 1 or (anchors[0].count or 2) > 1:
            named = ", ".join(f"{pods.kind}/{pods.name}" for pods in anchors)
            yield ClusterFault(
                item=claim,
                way=("spec", "accessModes"),
                text=f"is {', '.join(modes)}, a volume of one node, and the pods of {named} may be on several: all but "
                "those of the first node wait for it",
                way_out="write ReadWriteMany, or keep all of them beside one pod (components/one-node: podAffinity)",
            )
            continue
        together = set.intersection(*({node.name for node in possible_nodes(pods, nodes)} for pods, _ in users))
        if not together:
            shut_out = min((pods for pods, _ in users), key=lambda pods: len(possible_nodes(pods, nodes)[:2]))
            yield ClusterFault(
                item=claim,
                way=("spec", "accessModes"),
                text="is a volume of one node, and there is no node on which all pods that use it could run: "
                f"{shut_out.kind}/{shut_out.name} cannot be where the others are",
                way_out="give all of them the tolerations of the GPU nodes",
            )


def _follows(pods: PodTemplate, users: list[tuple[PodTemplate, Way]]) -> bool:
    """Whether these pods must run on the node of another template that uses the volume."""
    terms = items_at(pods.spec, "affinity", "podAffinity", "requiredDuringSchedulingIgnoredDuringExecution")
    others = [other for other, _ in users if (other.owner is not pods.owner or other.way != pods.way)]
    return any(
        term.get("topologyKey") == HOSTNAME and any(matches(term.get("labelSelector"), other.labels) for other in others)
        for term in terms
    )

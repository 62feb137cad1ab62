"""What the API server would refuse, or take and never act on."""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from gspo_services.prepare.cluster_check.model import (
    ClusterFault,
    ClusterModel,
    ContainerSpec,
    PodTemplate,
    at,
    items_at,
    matches,
    name_of,
    namespace_of,
    quantity,
    quantity_or_zero,
)

MAX_CONFIG_MAP_BYTES: Final = 1 << 20
MAX_APPLIED_BYTES: Final = 256 << 10
"""Of an object that `kubectl apply` takes without --server-side: it keeps a copy in an annotation."""
LWS_RESTARTS: Final = "RecreateGroupOnPodRestart"


def names(cluster: ClusterModel) -> Iterator[ClusterFault]:
    """No object is there twice: the second would replace the first."""
    counted = Counter((item.get("kind"), name_of(item), namespace_of(item)) for item in cluster.objects)
    for item in cluster.objects:
        count = counted.pop((item.get("kind"), name_of(item), namespace_of(item)), 0)
        if count > 1:
            text = f"is there {count} times in namespace {namespace_of(item)}"
            yield ClusterFault(item=item, way=("metadata", "name"), text=text, way_out="keep one of them")


def templates(cluster: ClusterModel) -> Iterator[ClusterFault]:
    """The templates of pods are accepted: restarts, selectors, resources."""
    for pods in cluster.pods:
        yield from _template(pods)
        for container in pods.containers:
            yield from _resources(container)


def _template(pods: PodTemplate) -> Iterator[ClusterFault]:
    policy = at(pods.spec, "restartPolicy") or "Always"
    if policy != "Always" and pods.kind not in ("Pod", "Job", "CronJob"):
        text = f"pods of a {pods.kind} cannot have restartPolicy {policy!r}: the API server refuses the {pods.kind}"
        yield ClusterFault(
            item=pods.owner, way=(*pods.way, "spec", "restartPolicy"), text=text, way_out="remove it, or write Always"
        )
    selector = at(pods.owner, "spec", "selector")
    if selector and not matches(selector, pods.labels):
        text = f"selects {selector}, but the pods that it makes are labelled {pods.labels}"
        yield ClusterFault(
            item=pods.owner, way=("spec", "selector"), text=text, way_out="give selector and template the same labels"
        )


def _resources(container: ContainerSpec) -> Iterator[ClusterFault]:
    item, way = container.pods.owner, (*container.way, "resources")
    for part in ("requests", "limits"):
        for key, value in at(container.data, "resources", part).items():
            try:
                quantity(value)
            except ValueError as error:
                yield ClusterFault(item=item, way=(*way, part, key), text=str(error), way_out="write 500m, 2 or 2Gi")
    requests, limits = at(container.data, "resources", "requests"), at(container.data, "resources", "limits")
    for key, value in requests.items():
        if "/" in key and quantity_or_zero(limits.get(key)) != quantity_or_zero(value):
            text = f"requests {key} {value}, and the limit is {limits.get(key, 'missing')}: devices need both, and equal"
            yield ClusterFault(item=item, way=(*way, "limits"), text=text, way_out=f'add {key}: "{value}" to the limits')
        elif key in limits and quantity_or_zero(value) > quantity_or_zero(limits[key]):
            text = f"requests {key} {value}, which is more than its limit {limits[key]}"
            yield ClusterFault(item=item, way=(*way, "requests", key), text=text, way_out="raise the limit")
    if "memory" not in limits:
        text = f"container {container.name} has no bound of its memory: it may take the node's, and others die for it"
        yield ClusterFault(item=item, way=way, text=text, way_out="add limits: {memory: ...}", status="warn")


def updates(cluster: ClusterModel) -> Iterator[ClusterFault]:
    """A new image or configuration reaches the pods, also when the old one crashes."""
    for item in cluster.of_kind("Deployment"):
        rolling = at(item, "spec", "strategy", "rollingUpdate")
        if rolling and {str(rolling.get(key, "25%")) for key in ("maxSurge", "maxUnavailable")} <= {"0", "0%"}:
            yield ClusterFault(
                item=item,
                way=("spec", "strategy", "rollingUpdate"),
                text="maxSurge and maxUnavailable are both 0: no pod could ever be replaced, and the API server refuses it",
                way_out="write maxUnavailable: 25%",
            )
    for item in cluster.of_kind("StatefulSet"):
        if at(item, "spec", "updateStrategy", "type") == "OnDelete":
            text = "OnDelete: pods keep their old image and configuration until somebody deletes them"
            yield ClusterFault(
                item=item, way=("spec", "updateStrategy", "type"), text=text, way_out="remove it, or write RollingUpdate"
            )
        if at(item, "spec", "podManagementPolicy") != "Parallel":
            yield ClusterFault(
                item=item,
                way=("spec", "podManagementPolicy"),
                text="a pod that crashes keeps its broken configuration: OrderedReady waits until it is ready, for ever",
                way_out="write podManagementPolicy: Parallel; it cannot be changed later, so delete the StatefulSet with "
                "--cascade=orphan and apply again",
            )
    for item in cluster.of_kind("LeaderWorkerSet"):
        if at(item, "spec", "leaderWorkerTemplate", "restartPolicy") != LWS_RESTARTS:
            yield ClusterFault(
                item=item,
                way=("spec", "leaderWorkerTemplate", "restartPolicy"),
                text="when one pod of the group ends, the others keep waiting for it in a collective",
                way_out=f"write restartPolicy: {LWS_RESTARTS}",
            )


def config_maps(cluster: ClusterModel) -> Iterator[ClusterFault]:
    """ConfigMaps and Secrets are no larger than the API server takes."""
    for item in cluster.of_kind("ConfigMap", "Secret"):
        base64 = {("data", key) for key in at(item, "data") if item["kind"] == "Secret"}
        base64 |= {("binaryData", key) for key in at(item, "binaryData")}
        texts = {(part, key): str(text) for part in ("data", "binaryData") for key, text in at(item, part).items()}
        sizes = {place: len(text.encode()) * (3 if place in base64 else 4) // 4 for place, text in texts.items()}
        total, way = sum(sizes.values()), max(sizes, key=lambda place: sizes[place], default=("data",))
        if total > MAX_CONFIG_MAP_BYTES:
            yield ClusterFault(
                item=item, way=way,
                text=f"holds {total / 2**20:.2f} MiB, and the API server takes 1 MiB at most",
                way_out="put large files on a volume, or into an image (docs/guide/kubernetes.md#your-code-and-data)",
            )  # fmt: skip
        elif total > MAX_APPLIED_BYTES:
            yield ClusterFault(
                item=item, way=way, status="warn",
                text=f"holds {total >> 10} KiB, and `kubectl apply` keeps a second copy, of 256 KiB at most, with it",
                way_out="apply with --server-side",
            )  # fmt: skip


def volume_claims(cluster: ClusterModel) -> Iterator[ClusterFault]:
    """What a run has written outlives its StatefulSet."""
    for item in cluster.of_kind("StatefulSet"):
        policy = at(item, "spec", "persistentVolumeClaimRetentionPolicy")
        for key in ("whenDeleted", "whenScaled"):
            if policy.get(key) == "Delete" and items_at(item, "spec", "volumeClaimTemplates"):
                yield ClusterFault(
                    item=item,
                    way=("spec", "persistentVolumeClaimRetentionPolicy", key),
                    text=f"{key}: Delete removes the run's ledger with the StatefulSet or with a scale to 0",
                    way_out="write Retain",
                )

"""The objects of a set as a cluster has them: templates with their pods, containers, and the nodes that they may run on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from gspo_services.prepare.cluster_check.model.objects import Object, Way, at, items_at, matches, name_of, namespace_of

TEMPLATES: Final[dict[str, tuple[Way, ...]]] = {
    "Deployment": (("spec", "template"),),
    "StatefulSet": (("spec", "template"),),
    "DaemonSet": (("spec", "template"),),
    "ReplicaSet": (("spec", "template"),),
    "Job": (("spec", "template"),),
    "CronJob": (("spec", "jobTemplate", "spec", "template"),),
    "Pod": ((),),
    "LeaderWorkerSet": (
        ("spec", "leaderWorkerTemplate", "leaderTemplate"),
        ("spec", "leaderWorkerTemplate", "workerTemplate"),
    ),
}
"""By kind of workload: where its templates of pods are."""
OPENSHIFT_DNS: Final = "openshift-dns"


@dataclass(frozen=True)
class ManifestObject:
    """One object and where it was read; ``lines``: the line of each field."""

    item: Object
    file: str = ""
    lines: dict[Way, int] = field(default_factory=dict)

    def line_of(self, way: Way) -> int:
        """The line of the field, or of the nearest part of the object that is there; 0 where nothing is known."""
        for length in range(len(way), -1, -1):
            if way[:length] in self.lines:
                return self.lines[way[:length]]
        return 0


@dataclass(frozen=True)
class ContainerSpec:
    """One container of a template."""

    pods: "PodTemplate"
    place: str
    index: int

    @property
    def data(self) -> Object:
        found: Object = self.pods.spec[self.place][self.index]
        return found

    @property
    def name(self) -> str:
        return str(self.data.get("name", self.index))

    @property
    def way(self) -> Way:
        return (*self.pods.way, "spec", self.place, self.index)

    @property
    def environment(self) -> dict[str, str]:
        """The variables whose value is written in the manifest."""
        return {str(entry.get("name")): str(entry["value"]) for entry in items_at(self.data, "env") if "value" in entry}

    @property
    def variables(self) -> set[str]:
        """The names of all variables, those included that only the cluster fills in."""
        return {str(entry.get("name")) for entry in items_at(self.data, "env")}

    @property
    def ports(self) -> dict[str, int]:
        found = {}
        for port in items_at(self.data, "ports"):
            if isinstance(port.get("containerPort"), int):
                found[str(port.get("name", port["containerPort"]))] = port["containerPort"]
        return found

    def mount(self, path: str) -> tuple[int, Object] | None:
        """The index and the mount that holds ``path``."""
        holding = [
            (index, mount)
            for index, mount in enumerate(items_at(self.data, "volumeMounts"))
            if f"{path}/".startswith(f"{str(mount.get('mountPath')).rstrip('/')}/")
        ]
        return max(holding, key=lambda found: len(str(found[1]["mountPath"])), default=None)


@dataclass(frozen=True)
class PodTemplate:
    """The pods that one template makes."""

    owner: Object
    way: Way

    @property
    def template(self) -> Object:
        found: Object = at(self.owner, *self.way)
        return found

    @property
    def kind(self) -> str:
        return str(self.owner.get("kind"))

    @property
    def name(self) -> str:
        return name_of(self.owner)

    @property
    def namespace(self) -> str:
        return namespace_of(self.owner)

    @property
    def spec(self) -> Object:
        found: Object = at(self.template, "spec")
        return found

    @property
    def labels(self) -> Object:
        found: Object = at(self.template, "metadata", "labels")
        return found

    @property
    def containers(self) -> list[ContainerSpec]:
        """Init containers first, as they start."""
        return [
            ContainerSpec(self, place, index)
            for place in ("initContainers", "containers")
            for index in range(len(items_at(self.spec, place)))
        ]

    @property
    def main(self) -> list[ContainerSpec]:
        return [container for container in self.containers if container.place == "containers"]

    @property
    def count(self) -> int | None:
        """How many pods it makes; None where a person or an autoscaler decides."""
        if self.kind == "LeaderWorkerSet":
            size = int(at(self.owner, "spec", "leaderWorkerTemplate", "size") or 1)
            return 1 if self.way[-1] == "leaderTemplate" else size - 1
        replicas = at(self.owner, "spec", "replicas")
        if isinstance(replicas, int):
            return replicas
        return None if self.kind == "Deployment" else 1

    @property
    def first_index(self) -> int:
        """The number of the first pod, of those that have numbers."""
        if self.kind == "LeaderWorkerSet":
            return 0 if self.way[-1] == "leaderTemplate" else 1
        return int(at(self.owner, "spec", "ordinals", "start") or 0)

    def volume(self, name: str) -> tuple[Way, Object] | None:
        """Where the volume, or the claim of a StatefulSet's template, is, and what it is."""
        for index, volume in enumerate(items_at(self.spec, "volumes")):
            if volume.get("name") == name:
                return (*self.way, "spec", "volumes", index), volume
        for index, claim in enumerate(items_at(self.owner, "spec", "volumeClaimTemplates")):
            if name_of(claim) == name:
                return ("spec", "volumeClaimTemplates", index), {"volumeClaimTemplate": claim}
        return None


class ClusterModel:
    """All objects of a set, and the questions that checks ask."""

    def __init__(self, manifests: Sequence[ManifestObject]) -> None:
        self.manifests = list(manifests)
        self._by_item = {id(manifest.item): manifest for manifest in self.manifests}

    @classmethod
    def of(cls, objects: Sequence[Object]) -> "ClusterModel":
        """A model of objects that were read from no file."""
        return cls([ManifestObject(item) for item in objects])

    def manifest_of(self, item: Object) -> ManifestObject:
        return self._by_item[id(item)]

    @property
    def objects(self) -> list[Object]:
        return [manifest.item for manifest in self.manifests]

    def of_kind(self, *kinds: str) -> list[Object]:
        return [item for item in self.objects if item.get("kind") in kinds]

    def find(self, kind: str, name: str, namespace: str | None = None) -> Object | None:
        """The object; ``namespace`` None: of a kind that has none, or wherever it is."""
        return next(
            (
                item
                for item in self.of_kind(kind)
                if name_of(item) == name and (namespace is None or namespace_of(item) == namespace)
            ),
            None,
        )

    @cached_property
    def pods(self) -> list[PodTemplate]:
        return [
            PodTemplate(item, way)
            for item in self.objects
            for way in TEMPLATES.get(str(item.get("kind")), ())
            if at(item, *way, "spec")
        ]

    @cached_property
    def containers(self) -> list[ContainerSpec]:
        return [container for pods in self.pods for container in pods.containers]

    def selected(self, selector: Any, namespace: str) -> list[PodTemplate]:
        return [pods for pods in self.pods if pods.namespace == namespace and matches(selector, pods.labels)]

    @cached_property
    def is_openshift(self) -> bool:
        """Whether users and groups are the cluster's to choose: no pod that runs as a person's says which."""
        return bool(self.pods) and not any(
            {"runAsUser", "fsGroup"} & set(at(pods.spec, "securityContext")) for pods in self.pods
        )

    def claims_of_sets(self, namespace: str) -> set[str]:
        """The claims that StatefulSets make from their templates, one for each pod."""
        return {
            f"{name_of(claim)}-{name_of(pods.owner)}-{pods.first_index + number}"
            for pods in self.pods
            if pods.namespace == namespace
            for claim in items_at(pods.owner, "spec", "volumeClaimTemplates")
            for number in range(pods.count or 0)
        }

    def users_of_claim(self, claim: str, namespace: str) -> Iterator[tuple[PodTemplate, Way]]:
        """The templates whose pods mount the claim, and where they say so."""
        for pods in self.pods:
            for index, volume in enumerate(items_at(pods.spec, "volumes")):
                if at(volume, "persistentVolumeClaim", "claimName") == claim and pods.namespace == namespace:
                    yield pods, (*pods.way, "spec", "volumes", index)

"""Names that objects give each other: each is there, and means what it is taken for."""

from collections.abc import Iterator
from typing import Final

from gspo_services.prepare.cluster_check.model import (
    ClusterFault,
    ClusterModel,
    ContainerSpec,
    Object,
    PodTemplate,
    Way,
    at,
    items_at,
    name_of,
    namespace_of,
)

KNOWN_CLASSES: Final = {
    "gspo-core": 100_000,
    "gspo-rollout": 1_000,
    "system-cluster-critical": 2_000_000_000,
    "system-node-critical": 2_000_001_000,
}
"""Priorities that a cluster has, or gets from deploy/k8s/cluster/priorities."""
PROBES: Final = ("startupProbe", "readinessProbe", "livenessProbe")


def pods(cluster: ClusterModel) -> Iterator[ClusterFault]:
    """What a pod needs before it starts: account, priority, ConfigMaps, Secrets, claims, volumes."""
    for made in cluster.pods:
        account = at(made.spec, "serviceAccountName") or "default"
        if account != "default" and not cluster.find("ServiceAccount", account, made.namespace):
            yield ClusterFault(
                item=made.owner,
                way=(*made.way, "spec", "serviceAccountName"),
                text=f"there is no ServiceAccount {account} in {made.namespace}: not one pod is made",
                way_out="remove serviceAccountName, since no process of ours needs one, or add the account",
            )
        priority = at(made.spec, "priorityClassName")
        if priority and priority not in KNOWN_CLASSES and not cluster.find("PriorityClass", priority):
            yield ClusterFault(
                item=made.owner,
                way=(*made.way, "spec", "priorityClassName"),
                text=f"there is no PriorityClass {priority}: not one pod is made",
                way_out=f"write one of {', '.join(list(KNOWN_CLASSES)[:2])} (deploy/k8s/cluster/priorities), or add it",
            )
        for index, volume in enumerate(items_at(made.spec, "volumes")):
            yield from _sources(cluster, made, volume, (*made.way, "spec", "volumes", index))
        for container in made.containers:
            yield from _container(cluster, container)


def _sources(cluster: ClusterModel, made: PodTemplate, volume: Object, way: Way) -> Iterator[ClusterFault]:
    wanted: list[tuple[str, str, Way]] = []
    if name := at(volume, "configMap", "name"):
        wanted.append(("ConfigMap", name, (*way, "configMap", "name")))
    if name := at(volume, "secret", "secretName"):
        wanted.append(("Secret", name, (*way, "secret", "secretName")))
    if name := at(volume, "persistentVolumeClaim", "claimName"):
        wanted.append(("PersistentVolumeClaim", name, (*way, "persistentVolumeClaim", "claimName")))
    for number, source in enumerate(items_at(volume, "projected", "sources")):
        for key, kind in (("secret", "Secret"), ("configMap", "ConfigMap")):
            if at(source, key, "name") and not at(source, key, "optional"):
                wanted.append((kind, at(source, key, "name"), (*way, "projected", "sources", number, key, "name")))
    for kind, name, place in wanted:
        if kind == "PersistentVolumeClaim" and name in cluster.claims_of_sets(made.namespace):
            continue
        if not at(volume, "configMap", "optional") and not cluster.find(kind, name, made.namespace):
            yield ClusterFault(
                item=made.owner,
                way=place,
                text=f"there is no {kind} {name} in {made.namespace}: the pods wait for it and never start",
                way_out=f"correct the name, or add the {kind} to what is applied",
            )


def _container(cluster: ClusterModel, container: ContainerSpec) -> Iterator[ClusterFault]:
    made = container.pods
    for index, mount in enumerate(items_at(container.data, "volumeMounts")):
        if made.volume(str(mount.get("name"))) is None:
            yield ClusterFault(
                item=made.owner,
                way=(*container.way, "volumeMounts", index, "name"),
                text=f"mounts {mount.get('name')!r}, and the pod has no volume of that name",
                way_out="correct the name, or add the volume",
            )
    for index, entry in enumerate(items_at(container.data, "env")):
        for key, kind in (("secretKeyRef", "Secret"), ("configMapKeyRef", "ConfigMap")):
            reference = at(entry, "valueFrom", key)
            if (
                reference
                and not reference.get("optional")
                and not cluster.find(kind, reference.get("name", ""), made.namespace)
            ):
                yield ClusterFault(
                    item=made.owner,
                    way=(*container.way, "env", index, "valueFrom", key),
                    text=f"there is no {kind} {reference.get('name')} in {made.namespace}: the container is not started",
                    way_out=f"add the {kind}, or write optional: true; if it is there, put what `kubectl -n "
                    f"{made.namespace} get {kind.lower()} {reference.get('name')} -o yaml` prints beside the manifests",
                )
    for probe in PROBES:
        port = at(container.data, probe, "httpGet", "port")
        if isinstance(port, str) and port not in container.ports:
            yield ClusterFault(
                item=made.owner,
                way=(*container.way, probe, "httpGet", "port"),
                text=f"asks port {port!r}, and the container has {', '.join(container.ports) or 'none'}",
                way_out="write the name of one of its ports",
            )


def services(cluster: ClusterModel) -> Iterator[ClusterFault]:
    """Services and budgets select pods, and Services point to ports that these have."""
    for item in cluster.of_kind("Service", "PodDisruptionBudget"):
        selector = at(item, "spec", "selector")
        chosen = cluster.selected(selector, namespace_of(item))
        if selector and not chosen:
            text = f"selects no pod of {namespace_of(item)}: {selector}"
            yield ClusterFault(item=item, way=("spec", "selector"), text=text, way_out="write the labels of the template")
        for index, port in enumerate(items_at(item, "spec", "ports")):
            target = port.get("targetPort", port.get("port"))
            headless = at(item, "spec", "clusterIP") == "None"
            for made in chosen:
                numbers = {name: number for each in made.main for name, number in each.ports.items()}
                number = numbers.get(str(target), target if target in numbers.values() else None)
                if number is None or (headless and number != port.get("port")):
                    yield ClusterFault(
                        item=item,
                        way=("spec", "ports", index),
                        text=f"port {port.get('port')} leads to {target!r}, and {made.kind}/{made.name} has {numbers}; "
                        "without a cluster address (headless) peers connect to the pod's own port",
                        way_out="give Service and container the same number, and targetPort the port's name",
                    )
    for item in cluster.of_kind("StatefulSet"):
        yield from _names_of_pods(cluster, item)


def _names_of_pods(cluster: ClusterModel, item: Object) -> Iterator[ClusterFault]:
    name = at(item, "spec", "serviceName")
    service = cluster.find("Service", str(name or ""), namespace_of(item))
    if service is None or at(service, "spec", "clusterIP") != "None":
        text = f"its Service {name or ''} is not there or has a cluster address: {name_of(item)}-0.{name} has no address"
        yield ClusterFault(
            item=item, way=("spec", "serviceName"), text=text, way_out="name a Service of the set with clusterIP: None"
        )
    elif at(service, "spec", "publishNotReadyAddresses") is not True:
        yield ClusterFault(
            item=service,
            way=("spec", "publishNotReadyAddresses"),
            text=f"hides the pods of StatefulSet/{name_of(item)} until they are ready, and others must reach them before",
            way_out="write publishNotReadyAddresses: true",
        )

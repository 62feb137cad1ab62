"""Checks that the objects of a set fit together, which neither a schema nor the API server does."""

import re
from collections import Counter
from collections.abc import Iterator

from tests.deploy.cluster import Cluster, Object, Pods, matches, quantity, title

CLUSTER_SCOPED = ("Namespace", "PriorityClass", "ResourceFlavor", "ClusterQueue")
SHARED_NAMESPACE = "monitoring"
"""Where the alerts and dashboards of all runs are."""
PORT_NAME = re.compile(r"(?=.*[a-z])[a-z0-9]([a-z0-9-]{0,13}[a-z0-9])?")
BUILT_IN_PRIORITIES = ("system-cluster-critical", "system-node-critical")


def namespaces(cluster: Cluster) -> Iterator[str]:
    """Every object is in the set's one namespace, and none is there twice."""
    (namespace,) = (item["metadata"]["name"] for item in cluster.of_kind("Namespace"))
    for item in cluster.objects:
        found = item["metadata"].get("namespace")
        shared = found == SHARED_NAMESPACE and item["kind"] in ("PrometheusRule", "ConfigMap")
        if item["kind"] not in CLUSTER_SCOPED and found != namespace and not shared:
            yield f"{title(item)} is in namespace {found}, not {namespace}"
    for name, count in Counter(title(item) for item in cluster.objects).items():
        if count > 1:
            yield f"{name} is there {count} times"


def selectors(cluster: Cluster) -> Iterator[str]:
    """Every selector selects something, and no two workloads the same pods."""
    for item in cluster.of_kind("Deployment", "StatefulSet"):
        chosen = [pods.name for pods in cluster.selected(item["spec"]["selector"])]
        own = [pods.name for pods in cluster.pods if pods.owner is item]
        if chosen != own:
            yield f"{title(item)} selects {chosen} but makes {own}"
    for item in cluster.objects:
        for selector in _pod_selectors(item):
            if not cluster.selected(selector):
                yield f"{title(item)} selects no pods: {selector}"
    for pods in cluster.pods:
        for spread in pods.spec.get("topologySpreadConstraints", []):
            if not matches(spread["labelSelector"], pods.labels):
                yield f"{pods.name}: its topology spread counts other pods, not its own"


def _pod_selectors(item: Object) -> Iterator[Object]:
    spec = item.get("spec", {})
    if item["kind"] in ("Service", "PodDisruptionBudget", "PodMonitor"):
        yield spec["selector"]
    if item["kind"] == "NetworkPolicy":
        yield spec["podSelector"]
        for rule, side in [*((r, "from") for r in spec.get("ingress", [])), *((r, "to") for r in spec.get("egress", []))]:
            for peer in rule.get(side, []):
                if "namespaceSelector" not in peer and "podSelector" in peer:
                    yield peer["podSelector"]


def ports(cluster: Cluster) -> Iterator[str]:
    """Every named port is a port of the pods that it refers to."""
    for pods in cluster.pods:
        yield from _container_ports(pods)
    for item in cluster.of_kind("Service"):
        for chosen in cluster.selected(item["spec"]["selector"]):
            for port in item["spec"].get("ports", []):
                # Headless: clients connect to the container's port number, whatever the Service has.
                if chosen.ports.get(port["targetPort"]) != port["port"]:
                    yield f"{title(item)}: port {port['port']} is not {port['targetPort']!r} of {chosen.name}"
    for item in cluster.of_kind("NetworkPolicy"):
        yield from _policy_ports(cluster, item)
    for item in cluster.of_kind("PodMonitor"):
        for endpoint in item["spec"]["podMetricsEndpoints"]:
            if not any(endpoint["port"] in chosen.ports for chosen in cluster.selected(item["spec"]["selector"])):
                yield f"{title(item)}: no pods with a port {endpoint['port']!r}"


def _container_ports(pods: Pods) -> Iterator[str]:
    for container in pods.containers:
        own = {port.get("name") for port in container.get("ports", [])}
        for name in own:
            if not PORT_NAME.fullmatch(str(name)):
                yield f"{pods.name}: port name {name!r} is not allowed"
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            port = container.get(probe, {}).get("httpGet", {}).get("port")
            if port is not None and port not in own:
                yield f"{pods.name}: {probe} asks port {port!r}, but there are {sorted(map(str, own))}"


def _policy_ports(cluster: Cluster, item: Object) -> Iterator[str]:
    spec = item["spec"]
    for rule in spec.get("ingress", []):
        yield from _missing(item, rule, cluster.selected(spec["podSelector"]))
    for rule in spec.get("egress", []):
        targets = [
            p for peer in rule.get("to", []) for p in cluster.selected(peer.get("podSelector")) if "ipBlock" not in peer
        ]
        yield from _missing(item, rule, targets)


def _missing(item: Object, rule: Object, targets: list[Pods]) -> Iterator[str]:
    for port in rule.get("ports", []):
        name = port["port"]
        if isinstance(name, str) and not any(name in pods.ports for pods in targets):
            yield f"{title(item)}: none of {[pods.name for pods in targets]} has a port {name!r}"


def volumes(cluster: Cluster) -> Iterator[str]:
    """Mounts have volumes, volumes are mounted, and their sources are in the set."""
    for pods in cluster.pods:
        mounted = {mount["name"] for container in pods.containers for mount in container.get("volumeMounts", [])}
        for name in mounted:
            if not pods.volume(name):
                yield f"{pods.name}: mount {name!r} has no volume"
        for volume in pods.spec.get("volumes", []):
            if volume["name"] not in mounted:
                yield f"{pods.name}: volume {volume['name']!r} is not mounted"
            yield from _missing_source(cluster, pods, volume)
        for container in pods.containers:
            paths = Counter(mount["mountPath"] for mount in container.get("volumeMounts", []))
            for path, count in paths.items():
                inside = [other for other in paths if path.startswith(other.rstrip("/") + "/")]
                if count > 1 or any("configMap" in pods.mount(other, container) for other in inside):
                    yield f"{pods.name}: {path} is mounted twice, or inside a ConfigMap, which is read-only"


def _missing_source(cluster: Cluster, pods: Pods, volume: Object) -> Iterator[str]:
    if "configMap" in volume and not cluster.find("ConfigMap", volume["configMap"]["name"]):
        yield f"{pods.name}: no ConfigMap {volume['configMap']['name']}"
    claim = volume.get("persistentVolumeClaim", {}).get("claimName")
    if claim and not cluster.find("PersistentVolumeClaim", claim) and claim not in _claims_of_sets(cluster):
        yield f"{pods.name}: no PersistentVolumeClaim {claim}"
    for source in volume.get("projected", {}).get("sources", []):
        secret = source.get("secret", {})
        if secret and not secret.get("optional") and not cluster.find("Secret", secret["name"]):
            yield f"{pods.name}: no Secret {secret['name']}"


def _claims_of_sets(cluster: Cluster) -> set[str]:
    return {
        f"{claim['metadata']['name']}-{pods.owner['metadata']['name']}-{index}"
        for pods in cluster.pods
        for claim in pods.owner["spec"].get("volumeClaimTemplates", [])
        for index in pods.indices
    }


def shared_volumes(cluster: Cluster) -> Iterator[str]:
    """A claim that several learner nodes write to is ReadWriteMany."""
    users: dict[str, list[Pods]] = {}
    for pods in cluster.pods:
        for volume in pods.spec.get("volumes", []) if pods.owner["spec"].get("replicas") != 0 else ():
            source = volume.get("persistentVolumeClaim", {})
            if source and not source.get("readOnly"):
                users.setdefault(source["claimName"], []).append(pods)
    for claim, writers in users.items():
        modes = (cluster.find("PersistentVolumeClaim", claim) or {"spec": {"accessModes": []}})["spec"]["accessModes"]
        if len(writers) > 1 and "ReadWriteMany" not in modes:
            yield f"PersistentVolumeClaim/{claim} is {modes}, but {[pods.name for pods in writers]} write to it"


def services_of_stateful_sets(cluster: Cluster) -> Iterator[str]:
    """serviceName is a headless Service of the set that selects these pods, and resolves before they are ready."""
    for item in cluster.of_kind("StatefulSet", "LeaderWorkerSet"):
        name = item["spec"].get("serviceName", item["metadata"]["name"])
        service = cluster.find("Service", name)
        if service is None:
            yield f"{title(item)}: no Service {name}"
        elif service["spec"].get("clusterIP") != "None" or not service["spec"].get("publishNotReadyAddresses"):
            yield f"{title(item)}: Service {name} is not headless, or hides pods that are not ready"
        elif not any(pods.owner is item for pods in cluster.selected(service["spec"]["selector"])):
            yield f"{title(item)}: Service {name} selects other pods"


def scaling(cluster: Cluster) -> Iterator[str]:
    """No apply sets the number of rollouts. Autoscalers scale an object of the set, between sensible bounds, slowly."""
    rollouts = cluster.role("rollout").owner
    if "replicas" in rollouts["spec"]:
        yield f"{title(rollouts)} sets replicas, so every apply would set back what an autoscaler or `kubectl scale` chose"
    for item in cluster.of_kind("HorizontalPodAutoscaler", "ScaledObject"):
        spec = item["spec"]
        reference = spec["scaleTargetRef"]
        target = cluster.find(reference.get("kind", "Deployment"), reference["name"])
        if target is None:
            yield f"{title(item)} scales {reference}, which is not there"
        keda = item["kind"] == "ScaledObject"
        low, high = (
            (spec["minReplicaCount"], spec["maxReplicaCount"]) if keda else (spec["minReplicas"], spec["maxReplicas"])
        )
        if not 1 <= low < high:
            yield f"{title(item)}: bounds {low} and {high} are not sensible"
        behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] if keda else spec["behavior"]
        if behavior["scaleDown"]["stabilizationWindowSeconds"] < 600:
            yield f"{title(item)}: scales down before new rollouts can have started"


def resources(cluster: Cluster) -> Iterator[str]:
    """Quantities can be read, requests are within limits, memory is bounded, priority classes exist."""
    for pods in cluster.pods:
        priority = pods.spec.get("priorityClassName")
        if priority and priority not in BUILT_IN_PRIORITIES and not cluster.find("PriorityClass", priority):
            yield f"{pods.name}: no PriorityClass {priority}"
        for container in pods.containers:
            given = container.get("resources", {})
            try:
                numbers = {
                    part: {key: quantity(v) for key, v in given.get(part, {}).items()} for part in ("requests", "limits")
                }
            except ValueError as error:
                yield f"{pods.name}: {error}"
                continue
            if "memory" not in numbers["requests"] or "memory" not in numbers["limits"]:
                yield f"{pods.name}: memory is not bounded"
            for key, limit in numbers["limits"].items():
                request = numbers["requests"].get(key, limit)
                if request > limit or ("/" in key and request != limit):
                    yield f"{pods.name}: {key} requests {request:g}, limit {limit:g}"


CHECKS = (namespaces, selectors, ports, volumes, shared_volumes, services_of_stateful_sets, scaling, resources)

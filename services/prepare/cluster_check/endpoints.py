"""Processes connect to what is bound: the name of a Service or of a pod, and the port of its container."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import urlsplit

from gspo_services.prepare.cluster_check.model import (
    ClusterFault,
    ClusterModel,
    PodTemplate,
    Way,
    at,
    config_map_of,
    matches,
    process_container,
    process_of,
    settings_of,
    words_of,
)
from gspo_services.shared.settings import CalledAddress, Process, Settings, called_addresses

PORTS: Final = {
    "broker.work_endpoint": "work",
    "broker.batch_endpoint": "batch",
    "learner.advertised_weights_endpoint": "weights",
    "learner.rendezvous_address": "rendezvous",
    "rollout.peer_weights_endpoint": "peer-weights",
}
"""By setting: the name of the port that answers there."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A connection that the process of some pods opens; ``target``: the pods that answer, None outside of the set."""

    source: PodTemplate
    called: CalledAddress
    target: PodTemplate | None


def calls_of(cluster: ClusterModel) -> Iterator[Call]:
    """Everything that the processes of the set say they connect to."""
    by_process: dict[str, PodTemplate] = {}
    for pods in sorted(cluster.pods, key=lambda pods: _node_rank(cluster, pods)):
        by_process.setdefault(process_of_pods(pods), pods)
    announced = settings_of(cluster, by_process["learner"]) if "learner" in by_process else None
    for pods in cluster.pods:
        settings, process = settings_of(cluster, pods), process_of_pods(pods)
        if settings is None or not process:
            continue
        if announced is not None and process == "rollout":
            # The learner says where its weights are.
            settings = settings.model_copy(update={"learner": announced.learner})
        for called in called_addresses(settings, process):
            yield Call(source=pods, called=called, target=by_process.get(called.process or "?"))


def _node_rank(cluster: ClusterModel, pods: PodTemplate) -> int:
    """Of a learner's nodes, whichever file comes first, only the one with rank 0 is called by others."""
    settings = settings_of(cluster, pods)
    return settings.learner.node_rank if settings else 0


def addresses(cluster: ClusterModel) -> Iterator[ClusterFault]:
    """Every address in the run's configuration is one that another pod has."""
    for call in calls_of(cluster):
        if call.target is not None and call.called.process != "rollout":  # Which have addresses and no names.
            key = call.called.setting
            yield from _reaches(cluster, call.source, call.target, key, call.called.address, PORTS[key])
    for pods in cluster.pods:
        if process_of_pods(pods):
            yield from _bound(cluster, pods)


def _reaches(
    cluster: ClusterModel, source: PodTemplate, target: PodTemplate, key: str, address: str, port: str
) -> Iterator[ClusterFault]:
    if "," in address:
        for each in address.split(","):
            yield from _reaches(cluster, source, target, key, each.strip(), port)
        return
    to = urlsplit(address)
    ports = {name: number for container in target.main for name, number in container.ports.items()}
    host = str(to.hostname).removesuffix(".svc.cluster.local").removesuffix(".svc").removesuffix(f".{target.namespace}")
    names = _names(cluster, target)
    if host not in names and host.count(".") > 1 and is_known_outside(cluster, target):
        return  # The name of a load balancer, or of a node.
    if host not in names:
        known = ", ".join(names) or "none: it has no headless Service"
        yield _fault(
            cluster, source, f"{key} is {address}, and {to.hostname} is no name of {target.kind}/{target.name}: {known}"
        )
    elif ports.get(port) != to.port:
        yield _fault(
            cluster, source, f"{key} is {address}, and port {port!r} of {target.kind}/{target.name} is {ports.get(port)}"
        )


def is_known_outside(cluster: ClusterModel, target: PodTemplate) -> bool:
    """Whether a Service makes these pods known outside of the cluster, under names that are not in the set."""
    outside = [item for item in cluster.of_kind("Service") if at(item, "spec", "type") in ("LoadBalancer", "NodePort")]
    return any(matches(at(service, "spec", "selector"), target.labels) for service in outside)


def _bound(cluster: ClusterModel, pods: PodTemplate) -> Iterator[ClusterFault]:
    settings = settings_of(cluster, pods)
    if settings is None:
        return
    for key, address, port in _bindings(settings, process_of_pods(pods)):
        at_port = urlsplit(address)
        ports = {name: number for container in pods.main for name, number in container.ports.items()}
        if at_port.hostname in ("127.0.0.1", "localhost", "::1"):
            yield _fault(cluster, pods, f"{pods.kind}/{pods.name} binds {key} to {address}: no other pod can connect")
        elif port in ports and ports[port] != at_port.port:
            yield _fault(
                cluster, pods, f"{pods.kind}/{pods.name} binds {key} to {address}, and its port {port!r} is {ports[port]}"
            )


def process_of_pods(pods: PodTemplate) -> Process | Literal[""]:
    """The run's process in these pods; empty for none."""
    container = process_container(pods)
    return "" if container is None else process_of(container)


def _bindings(settings: Settings, process: str) -> list[tuple[str, str, str]]:
    metrics = f"tcp://{settings.security.metrics_host}"
    if process == "broker":
        return [
            ("broker.work_endpoint", settings.broker.work_endpoint, "work"),
            ("broker.batch_endpoint", settings.broker.batch_endpoint, "batch"),
            ("broker.metrics_port", f"{metrics}:{settings.broker.metrics_port}", "metrics"),
        ]
    if process == "rollout":
        own = [("rollout.metrics_port", f"{metrics}:{settings.rollout.metrics_port}", "metrics")]
        peers = settings.rollout.peer_weights_endpoint
        fixed = peers and not peers.endswith("*")
        return [*own, ("rollout.peer_weights_endpoint", peers, "peer-weights")] if fixed else own
    health = ("learner.metrics_port", f"{metrics}:{settings.learner.metrics_port}", "health")
    if settings.learner.node_rank:
        return [health]
    return [("learner.weights_endpoint", settings.learner.weights_endpoint, "weights"), (*health[:2], "metrics")]


def _names(cluster: ClusterModel, pods: PodTemplate) -> list[str]:
    """DNS names inside its namespace of the first pod and of a broker's standbys."""
    service = str(at(pods.owner, "spec", "serviceName") or pods.name)
    if at(pods.owner, "spec", "networkConfig", "subdomainPolicy") == "UniquePerReplica":
        return [f"{pods.name}-0.{pods.name}-0"]
    if cluster.find("Service", service, pods.namespace) is None:
        return []
    count = (pods.count or 1) if process_of_pods(pods) == "broker" else 1
    return [service, *(f"{pods.name}-{place}.{service}" for place in range(count))]


def _fault(cluster: ClusterModel, pods: PodTemplate, text: str) -> ClusterFault:
    """At the configuration, where addresses are; at the pods where it cannot be found."""
    container = process_container(pods)
    assert container is not None
    config = next((word for word in words_of(container) if word.endswith(".toml")), "")
    found = config_map_of(cluster, container, config)
    item = cluster.find("ConfigMap", found[0], pods.namespace) if found else None
    way: Way = ("data", config.rpartition("/")[2]) if item else container.way
    way_out = "write names and ports as the Services and containers have them"
    return ClusterFault(item=item or pods.owner, way=way, text=text, way_out=way_out)

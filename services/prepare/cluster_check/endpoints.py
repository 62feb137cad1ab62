"""Processes connect to what is bound: the name of a Service or of a pod, and the port of its container."""

from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from gspo_services.prepare.cluster_check.model import (
    ClusterFault,
    ClusterModel,
    PodTemplate,
    Way,
    at,
    config_map_of,
    process_container,
    process_of,
    settings_of,
    words_of,
)
from gspo_services.shared.settings import Settings


def addresses(cluster: ClusterModel) -> Iterator[ClusterFault]:
    """Every address in the run's configuration is one that another pod has."""
    by_process: dict[str, PodTemplate] = {}
    for pods in cluster.pods:
        container = process_container(pods)
        if container is not None:
            by_process.setdefault(process_of(container), pods)
    broker, learner, rollout = (by_process.get(name) for name in ("broker", "learner", "rollout"))
    for pods in (found for found in (rollout, learner) if found):
        settings = settings_of(cluster, pods)
        if settings is None:
            continue
        if broker is not None and pods is rollout:
            yield from _reach_brokers(cluster, pods, broker, "broker.work_endpoint", settings.broker.work_endpoints, "work")
        if broker is not None and pods is learner:
            at_batch = settings.broker.batch_endpoints
            yield from _reach_brokers(cluster, pods, broker, "broker.batch_endpoint", at_batch, "batch")
        if learner is not None and pods is learner:
            advertised = settings.learner.advertised_weights_endpoint
            yield from _reaches(cluster, pods, learner, "learner.advertised_weights_endpoint", advertised, "weights")
            if settings.learner.num_nodes > 1:
                address = f"tcp://{settings.learner.rendezvous_address}"
                yield from _reaches(cluster, pods, learner, "learner.rendezvous_address", address, "rendezvous")
    for pods in (found for found in (broker, learner) if found):
        yield from _bound(cluster, pods)


def _reach_brokers(
    cluster: ClusterModel, source: PodTemplate, broker: PodTemplate, key: str, endpoints: Sequence[str], port: str
) -> Iterator[ClusterFault]:
    """Of several brokers each has the name of its own pod: that of the Service is any of them."""
    if len(endpoints) == 1:
        yield from _reaches(cluster, source, broker, key, endpoints[0], port)
        return
    for number, endpoint in enumerate(endpoints):
        found = list(_reaches(cluster, source, broker, f"{key} of broker {number}", endpoint, port, index=number))
        yield from found
        if found:
            return


def _reaches(
    cluster: ClusterModel,
    source: PodTemplate,
    target: PodTemplate,
    key: str,
    address: str,
    port: str,
    index: int | None = None,
) -> Iterator[ClusterFault]:
    """``index``: of the pod that must be meant; None: the Service's name will do."""
    if "," in address:
        for each in address.split(","):
            yield from _reaches(cluster, source, target, key, each.strip(), port, index)
        return
    to = urlsplit(address)
    ports = {name: number for container in target.main for name, number in container.ports.items()}
    host = str(to.hostname).removesuffix(".svc.cluster.local").removesuffix(".svc").removesuffix(f".{target.namespace}")
    names = _names(cluster, target, index)
    if host not in names:
        known = ", ".join(names) or "none: it has no headless Service"
        yield _fault(
            cluster, source, f"{key} is {address}, and {to.hostname} is no name of {target.kind}/{target.name}: {known}"
        )
    elif ports.get(port) != to.port:
        yield _fault(
            cluster, source, f"{key} is {address}, and port {port!r} of {target.kind}/{target.name} is {ports.get(port)}"
        )


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


def process_of_pods(pods: PodTemplate) -> str:
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
    return [
        ("learner.weights_endpoint", settings.learner.weights_endpoint, "weights"),
        ("learner.metrics_port", f"{metrics}:{settings.learner.metrics_port}", "metrics"),
    ]


def _names(cluster: ClusterModel, pods: PodTemplate, index: int | None = None) -> list[str]:
    """DNS names inside its namespace of the first pod and of a broker's standbys, or of the pod at ``index`` alone."""
    service = str(at(pods.owner, "spec", "serviceName") or pods.name)
    if at(pods.owner, "spec", "networkConfig", "subdomainPolicy") == "UniquePerReplica":
        return [f"{pods.name}-0.{pods.name}-0"]
    if cluster.find("Service", service, pods.namespace) is None:
        return []
    if index is not None:
        return [f"{pods.name}-{pods.first_index + index}.{service}"]
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

"""Sends every connection of a run through the network policies of both of its ends."""

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from gspo_services.prepare.cluster_check.endpoints import PORTS, Call, calls_of, is_known_outside, process_of_pods
from gspo_services.prepare.cluster_check.model import (
    OPENSHIFT_DNS,
    ClusterFault,
    ClusterModel,
    Object,
    PodTemplate,
    at,
    items_at,
    matches,
    name_of,
    namespace_of,
    process_container,
    settings_of,
)

NAMESPACE_LABEL: Final = "kubernetes.io/metadata.name"
PROMETHEUS_NAMESPACE: Final = "monitoring"
SERVICE_ADDRESS: Final = re.compile(r"https?://[\w-]+\.([\w-]+)\.svc")
WEB: Final = "93.184.216.34"
"""Some address outside of every cluster."""


@dataclass(frozen=True, kw_only=True)
class End:
    """One end of a connection: pods of the set, pods that every cluster has, or an address."""

    namespace: str = ""
    labels: Object | None = None
    address: str = ""
    whoever: bool = False
    """Which pods of the namespace is not known."""


DNS: Final = End(namespace="kube-system", labels={"k8s-app": "kube-dns"})
DNS_OF_OPENSHIFT: Final = End(namespace=OPENSHIFT_DNS, labels={"dns.operator.openshift.io/daemonset-dns": "default"})


def policies(cluster: ClusterModel) -> Iterator[ClusterFault]:
    """Everything that a run connects to can be reached, where policies restrict it at all."""
    for pods in cluster.pods:
        if process_container(pods) is not None:
            yield from _dns(cluster, pods)
            yield from _code_that_calls(cluster, pods)
        if any(_downloads(words) for words in _commands(pods)):
            yield from _download(cluster, pods)
    for call in calls_of(cluster):
        own = call.target is not None and call.called.setting in PORTS
        if own and call.target is not None and PORTS[call.called.setting] in _ports(call.target):
            yield from _connection(cluster, call.source, call.target, PORTS[call.called.setting])
        for address in call.called.address.split(","):
            if call.called.process is None or not _is_inside(cluster, call, address):
                yield from _outside(cluster, call.source, call.called.setting, address.strip())
    yield from _scrapes(cluster)
    yield from _between_nodes(cluster, [pods for pods in cluster.pods if process_of_pods(pods) == "learner"])


def open_doors(cluster: ClusterModel) -> Iterator[ClusterFault]:
    """Where policies restrict a run, they let only those in that have something to say there."""
    wanted = {(id(call.source), id(call.target), PORTS[call.called.setting]) for call in calls_of(cluster)
              if call.called.setting in PORTS}  # fmt: skip
    processes = [pods for pods in cluster.pods if process_container(pods) is not None]
    for target in processes if cluster.of_kind("NetworkPolicy") else ():
        if not _policies(cluster, target, "Ingress"):
            yield ClusterFault(
                item=target.owner, way=(*target.way, "metadata", "labels"), status="warn",
                text=f"no policy restricts who connects to {target.kind}/{target.name}: every pod of the cluster may",
                way_out="add base/network.yaml's policy default-deny",
            )  # fmt: skip
            continue
        for source in processes:
            for port, number in _ports(target).items():
                if (
                    (id(source), id(target), port) not in wanted
                    and process_of_pods(source) != process_of_pods(target)
                    and (
                        _open(cluster, source, _end(target), "Egress", port, number, "TCP")
                        and _open(cluster, target, _end(source), "Ingress", port, number, "TCP")
                    )
                ):
                    yield ClusterFault(
                        item=next(iter(_policies(cluster, target, "Ingress"))), way=("spec", "ingress"), status="warn",
                        text=f"{source.kind}/{source.name} may connect to port {port} of {target.kind}/{target.name}, "
                        "and has nothing to say there",
                        way_out=f"take the port out of the policy that is made for {target.name}",
                    )  # fmt: skip


def _is_inside(cluster: ClusterModel, call: Call, address: str) -> bool:
    """Whether a process of the set answers at this address, under a name that the cluster gives it."""
    host = str(urlsplit(address.strip()).hostname)
    return call.target is not None and not (host.count(".") > 1 and is_known_outside(cluster, call.target))


def _outside(cluster: ClusterModel, pods: PodTemplate, setting: str, address: str) -> Iterator[ClusterFault]:
    """``address`` is somewhere else: in another namespace, or in another network."""
    to = urlsplit(address)
    host, number = str(to.hostname), to.port or {"https": 443, "http": 80}.get(to.scheme, 0)
    if host in ("localhost", "127.0.0.1", "::1") or not number:
        return
    try:
        ends = [End(address=str(ipaddress.ip_address(host)))]
    except ValueError:
        ends = [End(namespace=[*host.split("."), pods.namespace][1], whoever=True), End(address=WEB)]
    if not any(_open(cluster, pods, end, "Egress", number, number, "TCP") for end in ends):
        yield ClusterFault(
            item=next(iter(_policies(cluster, pods, "Egress"))),
            way=("spec", "egress"),
            text=f"{pods.kind}/{pods.name} calls {setting} {address}, and no policy lets it reach port {number} there",
            way_out=f"add a NetworkPolicy for {pods.name} with egress to that namespace or ipBlock on TCP port {number}",
        )


def _code_that_calls(cluster: ClusterModel, pods: PodTemplate) -> Iterator[ClusterFault]:
    """reward.network is for code that calls a judge: somewhere it must get out."""
    settings = settings_of(cluster, pods)
    if settings is None or process_of_pods(pods) != "rollout" or not settings.reward.network:
        return
    found = _policies(cluster, pods, "Egress")
    beyond = ("ipBlock", "namespaceSelector")
    rules = [rule for item in found if "dns" not in name_of(item) for rule in items_at(item, "spec", "egress")]
    if found and not any(not items_at(rule, "to") or any(set(beyond) & set(to) for to in rule["to"]) for rule in rules):
        yield ClusterFault(
            item=found[0], way=("spec", "egress"), status="warn",
            text=f"reward.network is true, and no policy lets {pods.kind}/{pods.name} out of the run: a judge or another "
            "service that rewards call cannot be reached",
            way_out="add a NetworkPolicy for the rollouts with egress to what your rewards call",
        )  # fmt: skip


def _ports(pods: PodTemplate) -> dict[str, int]:
    return {name: number for container in pods.main for name, number in container.ports.items()}


def _commands(pods: PodTemplate) -> Iterator[str]:
    for container in pods.containers:
        yield " ".join(map(str, [*items_at(container.data, "command"), *items_at(container.data, "args")]))


def _downloads(words: str) -> bool:
    return "hf download" in words or "huggingface-cli" in words or "snapshot_download" in words


def _end(pods: PodTemplate) -> End:
    return End(namespace=pods.namespace, labels=pods.labels)


def _policies(cluster: ClusterModel, pods: PodTemplate, direction: str) -> list[Object]:
    """The policies that restrict these pods in one direction; none: all is open."""
    return [
        item
        for item in cluster.of_kind("NetworkPolicy")
        if namespace_of(item) == pods.namespace
        and matches(at(item, "spec", "podSelector"), pods.labels)
        and direction in (items_at(item, "spec", "policyTypes") or ["Ingress"])
    ]


def _open(
    cluster: ClusterModel, pods: PodTemplate, other: End, direction: str, port: object, number: int, protocol: str
) -> bool:
    """Whether a connection passes at the end that ``pods`` are."""
    found = _policies(cluster, pods, direction)
    side = "to" if direction == "Egress" else "from"
    return not found or any(
        _through(rule, namespace_of(policy), other, side, port, number, protocol)
        for policy in found
        for rule in items_at(policy, "spec", direction.lower())
    )


def _through(rule: Object, namespace: str, other: End, side: str, port: object, number: int, protocol: str) -> bool:
    peers, ports = items_at(rule, side), items_at(rule, "ports")
    if peers and not any(_is_peer(peer, namespace, other) for peer in peers):
        return False
    return not ports or any(
        each.get("protocol", "TCP") == protocol and (
            each.get("port") in (None, port, number)
            or (isinstance(each.get("port"), int) and each["port"] <= number <= int(each.get("endPort", each["port"])))
        )
        for each in ports
    )  # fmt: skip


def _is_peer(peer: Object, namespace: str, other: End) -> bool:
    if "ipBlock" in peer:
        try:
            block = ipaddress.ip_network(str(at(peer, "ipBlock", "cidr")), strict=False)
            return bool(other.address) and ipaddress.ip_address(other.address) in block
        except ValueError:
            return False
    if other.labels is None and not other.whoever:
        return False
    if "namespaceSelector" in peer:
        if not matches(peer["namespaceSelector"], {NAMESPACE_LABEL: other.namespace}):
            return False
    elif other.namespace != namespace:
        return False
    return other.labels is None or "podSelector" not in peer or matches(peer["podSelector"], other.labels)


def _dns(cluster: ClusterModel, pods: PodTemplate) -> Iterator[ClusterFault]:
    usual = all(_open(cluster, pods, DNS, "Egress", 53, 53, protocol) for protocol in ("UDP", "TCP"))
    openshift = all(_open(cluster, pods, DNS_OF_OPENSHIFT, "Egress", 5353, 5353, protocol) for protocol in ("UDP", "TCP"))
    if (openshift and cluster.is_openshift) or (usual and not cluster.is_openshift):
        return
    where = "openshift-dns, port 5353" if cluster.is_openshift else "kube-system, k8s-app: kube-dns, port 53"
    policy = next((item for item in _policies(cluster, pods, "Egress") if "dns" in name_of(item)), None)
    yield ClusterFault(
        item=policy or pods.owner,
        way=("spec", "egress") if policy else (*pods.way, "metadata", "labels"),
        text=f"{pods.kind}/{pods.name} cannot ask DNS: no policy lets it reach {where}, over UDP and TCP",
        way_out="allow egress to podSelector {k8s-app: kube-dns} in the namespace kube-system, as base/network.yaml does",
    )


def _download(cluster: ClusterModel, pods: PodTemplate) -> Iterator[ClusterFault]:
    if _open(cluster, pods, End(address=WEB), "Egress", 443, 443, "TCP"):
        if _policies(cluster, pods, "Egress") and not _open(cluster, pods, DNS, "Egress", 53, 53, "UDP"):
            yield from _dns(cluster, pods)
        return
    policy = next((item for item in _policies(cluster, pods, "Egress") if name_of(item) == pods.name), None)
    yield ClusterFault(
        item=policy or pods.owner,
        way=("spec", "egress") if policy else (*pods.way, "metadata", "labels"),
        text=f"{pods.kind}/{pods.name} downloads over HTTPS, and no policy lets it reach port 443 of other networks",
        way_out="allow egress to ipBlock {cidr: 0.0.0.0/0} on TCP port 443",
    )


def _connection(cluster: ClusterModel, source: PodTemplate, target: PodTemplate, port: str) -> Iterator[ClusterFault]:
    number = _ports(target)[port]
    ends = (("Egress", source, _end(target)), ("Ingress", target, _end(source)))
    for direction, pods, other in ends:
        if not _open(cluster, pods, other, direction, port, number, "TCP"):
            yield ClusterFault(
                item=next(iter(_policies(cluster, pods, direction))),
                way=("spec", direction.lower()),
                text=f"no policy lets {source.kind}/{source.name} reach port {port} ({number}) of {target.kind}/"
                f"{target.name}: {direction.lower()} of {pods.kind}/{pods.name}",
                way_out=f"allow it in the policy that is made for {pods.name}",
            )


def _between_nodes(cluster: ClusterModel, learners: list[PodTemplate]) -> Iterator[ClusterFault]:
    """The nodes of a learner reach each other on every port: collectives choose their own."""
    settings = next((found for pods in learners if (found := settings_of(cluster, pods))), None)
    if settings is None or settings.learner.num_nodes < 2:
        return
    for one in learners:
        for other in learners:
            if one is not other and not (
                _open(cluster, one, _end(other), "Egress", "", 40000, "TCP")
                and _open(cluster, other, _end(one), "Ingress", "", 40000, "TCP")
            ):
                yield ClusterFault(
                    item=one.owner,
                    way=(*one.way, "metadata", "labels"),
                    text=f"no policy opens all ports from {one.kind}/{one.name} to {other.kind}/{other.name}: the learner's "
                    "nodes cannot meet",
                    way_out="add the policy of components/learner-nodes/network.yaml",
                )


def _scrapes(cluster: ClusterModel) -> Iterator[ClusterFault]:
    namespace = PROMETHEUS_NAMESPACE
    for item in cluster.of_kind("ScaledObject"):
        for trigger in items_at(item, "spec", "triggers"):
            found = SERVICE_ADDRESS.match(str(at(trigger, "metadata", "serverAddress")))
            namespace = found[1] if found else namespace
    prometheus = End(namespace=namespace, labels={"app.kubernetes.io/name": "prometheus"})
    for monitor in cluster.of_kind("PodMonitor"):
        for pods in cluster.selected(at(monitor, "spec", "selector"), namespace_of(monitor)):
            for endpoint in items_at(monitor, "spec", "podMetricsEndpoints"):
                port = str(endpoint.get("port"))
                if port in _ports(pods) and not _open(cluster, pods, prometheus, "Ingress", port, _ports(pods)[port], "TCP"):
                    policy = next((item for item in _policies(cluster, pods, "Ingress") if "metrics" in name_of(item)), None)
                    yield ClusterFault(
                        item=policy or monitor,
                        way=("spec", "ingress") if policy else ("spec", "selector"),
                        text=f"Prometheus, in namespace {namespace}, cannot reach port {port} of {pods.kind}/{pods.name}",
                        way_out="allow ingress from the namespace that Prometheus is in",
                    )

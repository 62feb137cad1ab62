"""How pods behave: what they may do, when they are restarted, and what they connect to."""

import re
from collections.abc import Iterator

from gspo_services.learner.start.ranks import RANKS_STOP_S
from gspo_services.shared.runtime.telemetry import LOOP_STALL_S
from tests.deploy.cluster import Cluster, Object, Pods, matches, quantity

HOME = "/home/gspo"
PINNED = re.compile(r"\S+:[^:/]*\d[^:/]*|\S+@sha256:[0-9a-f]{64}")
EDGES = {
    ("rollout", "broker", "work"),
    ("learner", "broker", "batch"),
    ("rollout", "learner", "weights"),
}
"""Connections that may be opened: from, to, port."""
NODE_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


def restricted(cluster: Cluster) -> Iterator[str]:
    """The restricted Pod Security Standard, a read-only root, no token, and an image of a stated version."""
    for pods in cluster.pods:
        spec, security = pods.spec, pods.spec.get("securityContext", {})
        if not security.get("runAsNonRoot") or security.get("runAsUser") == 0:
            yield f"{pods.name}: may run as root"
        if security.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            yield f"{pods.name}: no seccomp profile"
        if spec.get("automountServiceAccountToken") is not False:
            yield f"{pods.name}: gets a token of the API server"
        if any(spec.get(key) for key in ("hostNetwork", "hostPID", "hostIPC")) or any(
            "hostPath" in v for v in spec["volumes"]
        ):
            yield f"{pods.name}: uses the host's namespaces or files"
        for container in pods.containers:
            own = container.get("securityContext", {})
            if own.get("allowPrivilegeEscalation") is not False or own.get("capabilities") != {"drop": ["ALL"]}:
                yield f"{pods.name}: {container['name']} can gain privileges"
            if own.get("readOnlyRootFilesystem") is not True:
                yield f"{pods.name}: {container['name']} writes into its image"
            if not PINNED.fullmatch(container["image"]):
                yield f"{pods.name}: image {container['image']} has no version"


def writable(cluster: Cluster) -> Iterator[str]:
    """Directories that must be writable are volumes, and memory file systems are smaller than the container's memory."""
    for pods in cluster.pods:
        wanted = ["/tmp"] if pods.role in ("broker", "model-download", "tools") else ["/tmp", HOME, "/dev/shm"]
        for path in wanted:
            if "emptyDir" not in pods.mount(path):
                yield f"{pods.name}: {path} cannot be written"
        memory = quantity(pods.main["resources"]["limits"]["memory"])
        for volume in pods.spec.get("volumes", []):
            if "emptyDir" not in volume:
                continue
            size = quantity(volume["emptyDir"].get("sizeLimit", "0"))
            if size == 0:
                yield f"{pods.name}: volume {volume['name']} has no bound"
            if volume["emptyDir"].get("medium") == "Memory" and size >= memory:
                yield f"{pods.name}: volume {volume['name']} may take all of its memory"


def probes(cluster: Cluster) -> Iterator[str]:
    """Probes ask processes on their metrics port, in time, and not before they can answer. They ask a learner's other nodes
    on their health port, and only whether they are alive."""
    for pods in cluster.pods:
        port = "health" if pods.role == "learner-worker" else "metrics"
        if pods.role in ("model-download", "tools"):
            continue
        wanted = {"startupProbe": ("/healthz", "/readyz"), "readinessProbe": ("/readyz",), "livenessProbe": ("/healthz",)}
        if pods.role == "rollout":
            wanted["startupProbe"] = ("/startupz",)  # /healthz is 200 long before SGLang has loaded its model
        if pods.role == "broker" and any(each["name"] == "GSPO_BROKER__DATABASE" for each in pods.main.get("env", [])):
            wanted["startupProbe"] = ("/startupz",)  # a standby is not ready until it leads
        if pods.role == "learner-worker":
            del wanted["readinessProbe"]
            if "readinessProbe" in pods.main:
                yield f"{pods.name}: a rolling update waits for a node that is ready only together with the others"
        for probe, paths in wanted.items():
            asked = pods.main.get(probe, {}).get("httpGet", {})
            if asked.get("path") not in paths or asked.get("port") != port:
                yield f"{pods.name}: {probe} asks {asked}, not {paths} on {port}"
        liveness = pods.main.get("livenessProbe", {})
        if liveness.get("periodSeconds", 10) * liveness.get("failureThreshold", 3) < LOOP_STALL_S:
            yield f"{pods.name}: killed for a stall shorter than {LOOP_STALL_S:.0f} s"
        if pods.role == "rollout":
            yield from _rollout_start(cluster, pods, pods.main.get("startupProbe", {}))


def _rollout_start(cluster: Cluster, pods: Pods, startup: Object) -> Iterator[str]:
    """The startup probe's budget is longer than SGLang's start may take."""
    budget_s = startup.get("initialDelaySeconds", 0) + startup.get("periodSeconds", 10) * startup.get("failureThreshold", 3)
    if budget_s <= cluster.settings(pods).rollout.start_timeout_s:
        yield f"{pods.name}: killed after {budget_s} s, while rollout.start_timeout_s lasts"


def stopping(cluster: Cluster) -> Iterator[str]:
    """The grace period is longer than the process needs to stop."""
    for pods in cluster.pods:
        settings = cluster.settings(pods)
        needed = {"broker": 10.0, "rollout": settings.rollout.drain_s + 10, "learner": RANKS_STOP_S + 30.0}
        needed["learner-worker"] = needed["learner"]
        grace_s = pods.spec.get("terminationGracePeriodSeconds", 30)
        if pods.role in needed and grace_s < needed[pods.role]:
            yield f"{pods.name}: {grace_s} s to stop in, {needed[pods.role]:.0f} s needed"
        if pods.role in needed and not pods.spec.get("shareProcessNamespace"):
            yield f"{pods.name}: its process is number 1, which ignores SIGTERM until it has set its handlers"


def disruption(cluster: Cluster) -> Iterator[str]:
    """Each long-lived pod has one disruption budget and leaves a dead node soon."""
    for pods in cluster.pods:
        if pods.role in ("model-download", "tools"):
            continue
        budgets = [b for b in cluster.of_kind("PodDisruptionBudget") if matches(b["spec"]["selector"], pods.labels)]
        if len(budgets) != 1:
            yield f"{pods.name}: {len(budgets)} disruption budgets"
        for taint in NODE_TAINTS:
            found = [t for t in pods.spec.get("tolerations", []) if t.get("key") == taint and t.get("effect") == "NoExecute"]
            if not found or found[0].get("tolerationSeconds", 300) > 60:
                yield f"{pods.name}: stays for minutes on a node with {taint}"
        gpu = any("nvidia.com/gpu" in c.get("resources", {}).get("limits", {}) for c in pods.containers)
        if gpu and not any(t.get("key") == "nvidia.com/gpu" for t in pods.spec.get("tolerations", [])):
            yield f"{pods.name}: requests a GPU but does not tolerate GPU nodes"


def network(cluster: Cluster) -> Iterator[str]:
    """No connection is allowed by default; then exactly the run's edges, DNS, and scrapes where there is a PodMonitor."""
    policies = cluster.of_kind("NetworkPolicy")
    both = {"Ingress", "Egress"}
    if not any(p["spec"]["podSelector"] == {} and set(p["spec"]["policyTypes"]) == both and _silent(p) for p in policies):
        yield "no NetworkPolicy denies by default"
    collective = {pods.role for pods in cluster.pods if "rendezvous" in pods.ports or pods.role == "learner-worker"}
    expected = EDGES | {(a, b, "*") for a in collective for b in collective if len(collective) > 1}
    for pods in cluster.pods:
        for endpoint in _peer_endpoints(pods):
            expected |= {(pods.role, pods.role, "peer-weights")}
            if not endpoint.endswith(f":{pods.ports.get('peer-weights')}"):
                yield f"{pods.name}: weights for other rollouts at {endpoint}, but its ports are {sorted(pods.ports)}"
    edges = {(a.role, b.role, port) for a in cluster.pods for b in cluster.pods for port in _open(policies, a, b)}
    for edge in sorted(expected - edges):
        yield f"{' -> '.join(edge)} is needed and not allowed"
    for edge in sorted(edges - expected):
        yield f"{' -> '.join(edge)} is allowed and not needed"
    for pods in cluster.pods:
        if not any(_reaches_dns(p, pods) for p in policies):
            yield f"{pods.name} cannot ask DNS"
        if (
            cluster.of_kind("PodMonitor")
            and "metrics" in pods.ports
            and not any(_lets_scrapes_in(p, pods) for p in policies)
        ):
            yield f"{pods.name} cannot be scraped"


def _peer_endpoints(pods: Pods) -> list[str]:
    variables = [variable for container in pods.containers for variable in container.get("env", [])]
    return [each["value"] for each in variables if each["name"] == "GSPO_ROLLOUT__PEER_WEIGHTS_ENDPOINT"]


def _silent(policy: Object) -> bool:
    return not policy["spec"].get("ingress") and not policy["spec"].get("egress")


def _open(policies: list[Object], source: Pods, target: Pods) -> set[str]:
    """Ports of ``target``'s main container that ``source`` may connect to; "*": all."""
    out = _allowed(policies, source, target, "egress", "to")
    into = _allowed(policies, target, source, "ingress", "from")
    return out & into | (out if "*" in into else set()) | (into if "*" in out else set())


def _allowed(policies: list[Object], own: Pods, other: Pods, direction: str, side: str) -> set[str]:
    found: set[str] = set()
    for policy in policies:
        if not matches(policy["spec"]["podSelector"], own.labels):
            continue
        for rule in policy["spec"].get(direction, []):
            peers = [peer for peer in rule.get(side, []) if set(peer) == {"podSelector"}]
            if any(matches(peer["podSelector"], other.labels) for peer in peers):
                found |= {str(port["port"]) for port in rule["ports"]} if "ports" in rule else {"*"}
    return found


def _reaches_dns(policy: Object, pods: Pods) -> bool:
    return matches(policy["spec"]["podSelector"], pods.labels) and any(
        {"protocol": "UDP", "port": 53} in rule.get("ports", []) for rule in policy["spec"].get("egress", [])
    )


def _lets_scrapes_in(policy: Object, pods: Pods) -> bool:
    return matches(policy["spec"]["podSelector"], pods.labels) and any(
        {"port": "metrics"} in rule.get("ports", []) and any("namespaceSelector" in peer for peer in rule["from"])
        for rule in policy["spec"].get("ingress", [])
    )


CHECKS = (restricted, writable, probes, stopping, disruption, network)

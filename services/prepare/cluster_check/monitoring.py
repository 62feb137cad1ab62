"""What measures a run and scales it: PodMonitors, autoscalers and their queries."""

import re
from collections.abc import Iterator
from typing import Final

from gspo_services.prepare.cluster_check.model import (
    ClusterFault,
    ClusterModel,
    Object,
    at,
    items_at,
    namespace_of,
    number_at,
)

NAMESPACE: Final = re.compile(r'namespace="([^"]*)"')
SECONDS: Final = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
POD_LABEL: Final = "__meta_kubernetes_pod_label_"
COMPONENT: Final = "component"
SHRINKING_S: Final = 600.0


def monitors(cluster: ClusterModel) -> Iterator[ClusterFault]:
    """Prometheus gets samples, and with the labels that alerts and dashboards ask for."""
    for item in cluster.of_kind("PodMonitor"):
        chosen = cluster.selected(at(item, "spec", "selector"), namespace_of(item))
        labels = {re.sub(r"\W", "_", str(key)) for pods in chosen for key in pods.labels}
        ports = {name for pods in chosen for container in pods.main for name in container.ports}
        for index, endpoint in enumerate(items_at(item, "spec", "podMetricsEndpoints")):
            yield from _endpoint(item, index, endpoint, ports, labels)


def _endpoint(item: Object, index: int, endpoint: Object, ports: set[str], labels: set[str]) -> Iterator[ClusterFault]:
    way = ("spec", "podMetricsEndpoints", index)
    if endpoint.get("path", "/metrics") != "/metrics":
        text = f"asks {endpoint['path']}, which is 404: processes answer /metrics"
        yield ClusterFault(item=item, way=(*way, "path"), text=text, way_out="write /metrics")
    if endpoint.get("port") not in ports:
        text = (
            f"asks port {endpoint.get('port')!r}, which no selected pod has: {', '.join(sorted(ports)) or 'it selects none'}"
        )
        yield ClusterFault(item=item, way=(*way, "port"), text=text, way_out="write metrics")
    interval, timeout = _seconds(endpoint.get("interval", "30s")), _seconds(endpoint.get("scrapeTimeout", "10s"))
    if timeout > interval:
        text = f"scrapeTimeout {endpoint.get('scrapeTimeout', '10s')} is longer than the interval: the operator refuses it"
        yield ClusterFault(item=item, way=(*way, "scrapeTimeout"), text=text, way_out="write a shorter one, such as 10s")
    given = False
    for number, rule in enumerate(items_at(endpoint, "relabelings")):
        sources = [str(source) for source in items_at(rule, "sourceLabels")]
        missing = [source for source in sources if source.startswith(POD_LABEL) and source[len(POD_LABEL) :] not in labels]
        if missing:
            yield ClusterFault(
                item=item, way=(*way, "relabelings", number, "sourceLabels"),
                text=f"no pod has the label of {missing[0]}: {rule.get('targetLabel')} would be empty",
                way_out=f"write {POD_LABEL}app_kubernetes_io_component",
            )  # fmt: skip
        given = given or (rule.get("targetLabel") == COMPONENT and rule.get("action", "replace") == "replace")
    if not given:
        text = "sets no label component, which every alert and dashboard asks for: none would ever fire"
        way_out = f"add {{sourceLabels: [{POD_LABEL}app_kubernetes_io_component], targetLabel: component}}"
        yield ClusterFault(item=item, way=(*way, "relabelings"), text=text, way_out=way_out)


def _seconds(text: object) -> float:
    parts = re.findall(r"(\d+)(ms|s|m|h)", str(text))
    return sum(float(number) * SECONDS[unit] for number, unit in parts)


def autoscalers(cluster: ClusterModel) -> Iterator[ClusterFault]:
    """Autoscalers scale what is there, by what this run measures."""
    for item in cluster.of_kind("HorizontalPodAutoscaler", "ScaledObject"):
        reference = at(item, "spec", "scaleTargetRef")
        kind, name = str(reference.get("kind", "Deployment")), str(reference.get("name"))
        target = cluster.find(kind, name, namespace_of(item))
        api = reference.get("apiVersion")
        if target is None or api not in (None, target.get("apiVersion")):
            text = f"scales {kind}/{name}" + (f" of {api}" if target else "") + ", which is not there"
            yield ClusterFault(item=item, way=("spec", "scaleTargetRef"), text=text, way_out="name the Deployment rollout")
        keda = item["kind"] == "ScaledObject"
        low = number_at(item, "spec", "minReplicaCount" if keda else "minReplicas", default=0 if keda else 1)
        high = number_at(item, "spec", "maxReplicaCount" if keda else "maxReplicas", default=100)
        if not 1 <= low <= high:
            text = f"between {low:.0f} and {high:.0f} rollouts: without any, nothing is measured that could ask for more"
            way = ("spec", "minReplicaCount" if keda else "minReplicas")
            yield ClusterFault(item=item, way=way, text=text, way_out="write at least 1, and a larger maximum")
        down = ("spec", "advanced", "horizontalPodAutoscalerConfig", "behavior") if keda else ("spec", "behavior")
        window = number_at(item, *down, "scaleDown", "stabilizationWindowSeconds", default=300)
        if window < SHRINKING_S:
            yield ClusterFault(
                item=item, way=(*down, "scaleDown", "stabilizationWindowSeconds"),
                text=f"shrinks after {window:.0f} s, before rollouts that were asked for have started",
                way_out="write 900",
            )  # fmt: skip
        for index, trigger in enumerate(items_at(item, "spec", "triggers")):
            for namespace in NAMESPACE.findall(str(at(trigger, "metadata", "query"))):
                if namespace != namespace_of(item):
                    yield ClusterFault(
                        item=item,
                        way=("spec", "triggers", index, "metadata", "query"),
                        text=f"asks about the run in namespace {namespace}, and scales the one in {namespace_of(item)}",
                        way_out=f'write namespace="{namespace_of(item)}" (the overlays have a replacement that does it)',
                    )

"""What processes export, and what the queries of a set ask for."""

import re
from collections.abc import Callable, Iterator
from functools import cache

from prometheus_client import CollectorRegistry

from gspo_services.broker.metrics import BrokerMetrics
from gspo_services.learner.metrics import LearnerMetrics
from gspo_services.rollout.metrics import RolloutMetrics
from gspo_services.tasks.sandbox.server.metrics import SandboxMetrics
from tests.deploy.cluster import Cluster, title, walk

METRIC = re.compile(r"(?<![\w:])(?:\w+:)*gspo_[a-z0-9_:]+")


@cache
def metric_names() -> frozenset[str]:
    """Every sample name that the processes export."""
    names: set[str] = set()
    makers: tuple[Callable[[CollectorRegistry], object], ...]
    makers = (BrokerMetrics, LearnerMetrics, RolloutMetrics, SandboxMetrics)
    for make in makers:
        registry = CollectorRegistry()
        make(registry)
        for family in registry.collect():
            suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
            names |= {family.name + suffix for suffix in suffixes}
    return frozenset(names)


def unknown(cluster: Cluster) -> Iterator[str]:
    """Metrics in queries that no process exports and no rule of the set records."""
    asking = cluster.of_kind("PrometheusRule", "ScaledObject", "HorizontalPodAutoscaler")
    recorded = {value for item in asking for path, value in walk(item) if path.endswith("/record")}
    for item in asking:
        for path, value in walk(item["spec"]):
            if path.endswith(("/expr", "/query", "/metric/name")) and isinstance(value, str):
                for name in sorted(set(METRIC.findall(value)) - metric_names() - recorded):
                    yield f"{title(item)}: no process exports {name}"

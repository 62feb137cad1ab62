"""The vocabulary of queries: every sample that the processes export, with its labels and its first series."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from deploy.monitoring.generate import RULES
from gspo.moe.experts import ExpertPicks, ExpertTally
from gspo.settings import Anchor, Objective
from gspo_services.broker.metrics import BrokerMetrics
from gspo_services.learner.metrics import LearnerMetrics
from gspo_services.rollout.endpoint import EndpointMetrics
from gspo_services.rollout.metrics import RolloutMetrics
from gspo_services.rollout.sglang.metrics import ENGINE_METRICS, EngineMetrics
from gspo_services.tasks.sandbox.server.metrics import SandboxMetrics
from tests.support.engines.bigram_engine import BigramEngine
from tests.support.learner.trained import train
from tests.support.loss.sequences import random_groups

TARGET_LABELS = frozenset({"namespace", "pod", "component", "instance", "job"})
"""Labels that the scrape adds to every sample: in deploy/monitoring/monitor.py, and in the PodMonitor of deploy/k8s."""
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
COMPONENTS = ("broker", "learner", "rollout", "sandbox")


@dataclass
class Samples:
    """The samples of one name."""

    labels: set[str]
    series: list[dict[str, str]] = field(default_factory=list)
    """Labels of the series that exist from the start. Without any, every value is possible."""


Vocabulary = dict[str, Samples]


@cache
def vocabulary() -> Vocabulary:
    """All samples except those that rules record."""
    alerts = [{"alertname": rule["alert"], "alertstate": state} for rule in rules() if "alert" in rule for state in STATES]
    known: Vocabulary = {
        "up": Samples(set(TARGET_LABELS), [{"component": name} for name in COMPONENTS]),
        "ALERTS": Samples({"alertname", "alertstate", "severity"} | TARGET_LABELS, alerts),
    }
    for make in (BrokerMetrics, LearnerMetrics, RolloutMetrics, EndpointMetrics, SandboxMetrics):
        registry = CollectorRegistry()
        made = make(registry)
        if isinstance(made, LearnerMetrics):
            made.set_diagnostics(diagnostics())
        _add(known, registry)
    engine = CollectorRegistry()
    engine.register(EngineMetrics("http://127.0.0.1:1"))
    _add(known, engine)
    # tests/integration/rollout/test_engine_metrics.py checks on a real server that SGLang exports these.
    for name in ENGINE_METRICS:
        suffixes = ("_bucket", "_sum", "_count") if name.endswith("_seconds") else ("", "_total")
        known |= {name + suffix: Samples({"model_name", "le"} | TARGET_LABELS) for suffix in suffixes}
    return known


STATES = ("pending", "firing")


def diagnostics() -> dict[str, float]:
    """What the learner reports of a batch with several lags, trained here on a table, together with a router's picks."""

    def trained(anchor: Anchor, versions: tuple[int, int]) -> dict[str, float]:
        groups = random_groups(8, 4, seed=0, versions=versions)
        return train(BigramEngine(), groups, Objective(anchor=anchor), policy_version=6).metrics

    # Each anchor has measurements of its own; those of calibration need many sequences of one lag.
    metrics = trained("behaviour", (6, 6)) | trained("proximal", (0, 6))
    tally, mask_T = ExpertTally(compares=True), torch.ones(2, dtype=torch.bool)
    picks = ExpertPicks(torch.tensor([[[0], [1]]], dtype=torch.int8), num_experts=2)
    for lag in range(6):
        lag_S, ids_T = torch.tensor([float(lag)]), torch.zeros(2, dtype=torch.int64)
        tally.add(picks, mask_T, ids_T, lag_S, reference=picks)
        tally.compare(picks, picks.indices_LTK.transpose(0, 1), mask_T, ids_T, lag_S)
    # Other batches have the buckets that this one leaves empty.
    names = {key.partition("/")[0] for key in metrics if key.endswith("/lag_5_up")}
    lags = {f"{name}/{bucket}": 0.0 for name in names for bucket in ("lag_0", "lag_1", "lag_2", "lag_3_4")}
    return {**lags, **metrics, **tally.metrics(torch.Tensor.clone), "train_s": 1.0, "publish_s": 1.0, "publish_wait_s": 0.1}


def recorded(rules: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Expressions of recording rules by name."""
    return {rule["record"]: rule["expr"] for rule in rules if "record" in rule}


def rules() -> list[dict[str, Any]]:
    """Every rule of deploy/monitoring/rules."""
    files = [yaml.safe_load(path.read_text()) for path in sorted(RULES.glob("*.yaml"))]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


def _add(known: Vocabulary, registry: CollectorRegistry) -> None:
    declared = {
        name: set(collector._labelnames)
        for collector, names in registry._collector_to_names.items()
        if isinstance(collector, MetricWrapperBase)
        for name in names
    }
    for family in registry.collect():
        for suffix in SUFFIXES.get(family.type, ("",)):
            name = family.name + suffix
            samples = known.setdefault(name, Samples(set(TARGET_LABELS)))
            samples.labels |= declared.get(family.name, set()) | ({"le"} if suffix == "_bucket" else set())
            samples.series += [sample.labels for sample in family.samples if sample.name == name]

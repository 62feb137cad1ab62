"""Metrics that a class declares, and an instance registers."""

import pytest
from prometheus_client import CollectorRegistry

from gspo_services.shared.runtime.process_metrics import MetricTable, counter, gauge, histogram


class OvenMetrics(MetricTable):
    prefix = "oven_"
    loaves = counter("loaves_total", "Loaves, by fate", "fate", zeros=("sold", "burnt"))
    heat = gauge("heat_celsius", "Heat of a shelf", "shelf")
    bake_seconds = histogram("bake_seconds", "Time of a loaf", buckets=(60, 600))


class LargeOvenMetrics(OvenMetrics):
    doors = gauge("doors", "Open doors")


def test_metrics_are_registered_in_the_order_of_their_declarations() -> None:
    registry = CollectorRegistry()
    LargeOvenMetrics(registry)
    found = [(family.name, family.type, family.documentation) for family in registry.collect()]
    assert found == [
        ("oven_loaves", "counter", "Loaves, by fate"),
        ("oven_heat_celsius", "gauge", "Heat of a shelf"),
        ("oven_bake_seconds", "histogram", "Time of a loaf"),
        ("oven_doors", "gauge", "Open doors"),
    ]


def test_only_the_named_series_exist_from_the_start() -> None:
    registry = CollectorRegistry()
    OvenMetrics(registry)
    loaves, heat, bake = registry.collect()
    assert [each.labels["fate"] for each in loaves.samples if each.name == "oven_loaves_total"] == ["sold", "burnt"]
    assert heat.samples == []
    assert [each.labels["le"] for each in bake.samples if "le" in each.labels] == ["60.0", "600.0", "+Inf"]


def test_each_instance_counts_for_itself() -> None:
    registry, other = CollectorRegistry(), CollectorRegistry()
    metrics, _ = OvenMetrics(registry), OvenMetrics(other)
    metrics.loaves.labels("burnt").inc(3)
    counted = [each.get_sample_value("oven_loaves_total", {"fate": "burnt"}) for each in (registry, other)]
    assert counted == [3, 0]


def test_a_class_that_only_declares_a_metric_says_so() -> None:
    with pytest.raises(AttributeError, match="OvenMetrics only declares loaves_total: an instance"):
        _ = OvenMetrics.loaves

"""What the processes export besides their loops' own counts, and how it is named."""

import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from gspo_protocol.messages import Heartbeat
from gspo_services.broker.ledger.actions import SessionKey
from gspo_services.broker.metrics import ROLLOUT_STATUSES, SILENT, BrokerMetrics
from gspo_services.learner.metrics import LearnerMetrics
from gspo_services.rollout.endpoint import EndpointMetrics
from gspo_services.rollout.metrics import STATUSES, RolloutMetrics
from gspo_services.tasks.environments import FailureReason
from tests.support.broker.ledger import LEARNER, LedgerHarness, config_with


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


def test_the_broker_counts_rollouts_by_the_status_that_they_last_reported() -> None:
    broker, registry = LedgerHarness(), CollectorRegistry()
    metrics = BrokerMetrics(registry)
    for name, status in (("a", "serving"), ("b", "serving"), ("c", "quarantined"), ("d", "")):
        sender = SessionKey(name, "1")
        broker.hello(sender)
        if status:
            broker.send(sender, Heartbeat(policy_version=0, status=status, leases=[]))  # type: ignore[arg-type]
    metrics.observe(broker.ledger, 0, 0, broker.now)
    counted = {status: value(registry, "gspo_broker_rollouts", status=status) for status in ROLLOUT_STATUSES}
    assert counted == {"starting": 1, "verifying": 0, "serving": 2, "draining": 0, "quarantined": 1, "gone": 0, "silent": 0}


def test_a_rollout_that_is_not_heard_for_a_lease_does_not_count_as_serving() -> None:
    broker, registry = LedgerHarness(), CollectorRegistry()
    metrics = BrokerMetrics(registry)
    sender = SessionKey("a", "1")
    broker.hello(sender)
    broker.send(sender, Heartbeat(policy_version=0, status="serving", leases=[]))
    broker.tick(broker.config.lease_s)
    metrics.observe(broker.ledger, 0, 0, broker.now)
    assert value(registry, "gspo_broker_rollouts", status="serving") == 1
    broker.tick(1.0)
    metrics.observe(broker.ledger, 0, 0, broker.now)
    assert value(registry, "gspo_broker_rollouts", status="serving") == 0
    assert value(registry, "gspo_broker_rollouts", status="silent") == 1


def test_a_rollout_exports_the_time_and_the_failures_of_rewards_from_the_start() -> None:
    registry = CollectorRegistry()
    metrics = RolloutMetrics(registry)
    for part in ("wait", "work"):
        assert value(registry, "gspo_rollout_reward_seconds_count", part=part) == 0
    for failure in get_args(FailureReason):
        assert value(registry, "gspo_rollout_reward_failures_total", failure=failure) == 0
    metrics.reward_took("work", 2.0)
    assert value(registry, "gspo_rollout_reward_seconds_sum", part="work") == 2.0


def test_every_status_of_the_protocol_is_counted() -> None:
    assert set(get_args(Heartbeat.__annotations__["status"])) == set(ROLLOUT_STATUSES) - {SILENT, "gone"} == set(STATUSES)


def test_the_broker_exports_the_bounds_for_its_gauges() -> None:
    registry = CollectorRegistry()
    broker = LedgerHarness(config_with(max_lag=3, groups_per_batch=5, num_batches=7))
    BrokerMetrics(registry).observe(broker.ledger, 0, 0, broker.now)
    assert value(registry, "gspo_broker_max_lag_versions") == 3
    assert value(registry, "gspo_broker_batch_groups") == 5
    assert value(registry, "gspo_broker_batches_wanted") == 7


def test_the_broker_exports_the_zero_advantage_groups_of_the_last_batch() -> None:
    registry, rollout = CollectorRegistry(), SessionKey("r", "1")
    metrics = BrokerMetrics(registry)
    broker = LedgerHarness(config_with(groups_per_batch=2))
    broker.hello(LEARNER, "learner")
    broker.hello(rollout)
    broker.publish(1, 0)
    for index, lease in enumerate(broker.lease(rollout, capacity=2 * broker.config.group_size)):
        # Only the first group's rewards differ.
        broker.episode(rollout, lease, 1, reward=float(index == 0))
    broker.request_batch(0, 1)
    metrics.observe(broker.ledger, 0, 0, broker.now)
    assert value(registry, "gspo_broker_batches_assembled") == 1
    assert value(registry, "gspo_broker_zero_advantage_groups") == 1


def test_a_gauge_that_no_batch_has_measured_yet_is_nan() -> None:
    registry = CollectorRegistry()
    BrokerMetrics(registry).observe(LedgerHarness().ledger, 0, 0, 100.0)
    for name in ("train_reward", "eval_reward", "lag_mean_versions", "lag_max_versions", "zero_advantage_groups"):
        assert math.isnan(value(registry, f"gspo_broker_{name}") or 0.0), name


def test_the_ledgers_disk_is_measured_at_each_scrape_and_a_missing_disk_is_not_a_full_one(tmp_path: Path) -> None:
    registry, directory = CollectorRegistry(), tmp_path / "run"
    directory.mkdir()
    BrokerMetrics(registry).watch_disk(directory)
    usage = shutil.disk_usage(directory)
    assert value(registry, "gspo_broker_disk_bytes") == usage.total
    assert value(registry, "gspo_broker_disk_free_bytes") == pytest.approx(usage.free, rel=0.05)
    directory.rmdir()
    gone = value(registry, "gspo_broker_disk_free_bytes")
    assert gone is not None
    assert math.isnan(gone)


def test_a_diagnostic_that_the_last_batch_did_not_measure_is_not_exported() -> None:
    registry = CollectorRegistry()
    metrics = LearnerMetrics(registry)
    metrics.set_diagnostics({"reward_mean": 0.5, "clip_fraction/lag_0": 0.1, "clip_fraction/advantage_positive": 0.2})
    metrics.set_diagnostics({"reward_mean": 0.7, "clip_fraction/advantage_positive": 0.3})
    found = {
        (sample.labels["name"], sample.labels["bucket"]): sample.value
        for family in registry.collect()
        if family.name == "gspo_learner_diagnostic"
        for sample in family.samples
    }
    assert found == {("reward_mean", ""): 0.7, ("clip_fraction", "advantage_positive"): 0.3}


def test_the_brokers_counters_of_groups_are_there_before_they_count() -> None:
    registry = CollectorRegistry()
    BrokerMetrics(registry)
    for reason in ("stale", "failed"):
        assert value(registry, "gspo_broker_dropped_groups_total", reason=reason) == 0
        assert value(registry, "gspo_broker_trajectory_tokens_count", outcome=reason) == 0
    assert value(registry, "gspo_broker_trajectory_tokens_count", outcome="finished") == 0


def test_a_rollouts_counters_start_at_zero() -> None:
    registry = CollectorRegistry()
    RolloutMetrics(registry)
    assert value(registry, "gspo_rollout_weight_updates_total", outcome="failed") == 0
    assert value(registry, "gspo_rollout_episodes_total", outcome="engine_error") == 0
    assert value(registry, "gspo_rollout_tokens_total", kind="action") == 0
    assert value(registry, "gspo_rollout_reward_failures_total", failure="deadline") == 0
    assert value(registry, "gspo_rollout_agent_failures_total", failure="hung") == 0
    assert value(registry, "gspo_rollout_status", status="quarantined") == 0


@pytest.mark.parametrize(
    ("component", "make"), [("broker", BrokerMetrics), ("learner", LearnerMetrics), ("rollout", RolloutMetrics)]
)
def test_each_process_names_its_release_and_counts_its_memory(component: str, make: type) -> None:
    registry = CollectorRegistry()
    make(registry)
    (info,) = [family for family in registry.collect() if family.name == "gspo_build_info"]
    assert [sample.labels["component"] for sample in info.samples] == [component]
    assert info.samples[0].labels["python"] == ".".join(str(part) for part in sys.version_info[:3])
    resident = value(registry, "process_resident_memory_bytes")
    assert resident is not None
    assert 10e6 < resident < 1e12


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
@pytest.mark.parametrize("make", [BrokerMetrics, LearnerMetrics, RolloutMetrics, EndpointMetrics])
def test_names_and_units_follow_prometheus_conventions(make: type) -> None:
    registry = CollectorRegistry()
    make(registry)
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=generate_latest(registry), capture_output=True, check=False, timeout=60
    )
    assert (checked.returncode, checked.stderr.decode()) == (0, "")


def test_the_broker_exports_why_the_run_does_not_learn_also_after_a_restart() -> None:
    silent = {"event": "batch", "signal_sequences/all": 0, "groups/all": 8, "reward_mean": 0.0, "reward_std": 0.0}
    lines = [{**silent, "batch": index} for index in range(3)]
    registry = CollectorRegistry()
    metrics = BrokerMetrics(registry)
    metrics.count(lines[0])
    assert value(registry, "gspo_broker_learning_finding", reason="no_signal") == 0
    metrics.count(lines[1])
    metrics.count(lines[2])
    assert value(registry, "gspo_broker_learning_finding", reason="no_signal") == 1
    metrics.count({**silent, "batch": 3, "signal_sequences/all": 9})
    assert value(registry, "gspo_broker_learning_finding", reason="no_signal") == 0
    restarted = CollectorRegistry()
    BrokerMetrics(restarted).recall(lines)
    assert value(restarted, "gspo_broker_learning_finding", reason="no_signal") == 1

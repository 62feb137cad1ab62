"""Every alert, checked by promtool: silent in a healthy hour and while it waits, then firing with the right words."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.monitoring.generate import RULES, rule_groups
from tests.monitoring.faults import EXCUSED, FAULTS, OVER, PAUSED, STARTING, Fault
from tests.monitoring.series import BROKER, OTHER, Series, as_test, healthy, rising, series, then
from tests.monitoring.vocabulary import rules

ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}
needs_promtool = pytest.mark.monitoring


def promtool(directory: Path, tests: list[dict[str, Any]]) -> str:
    """The output of ``promtool test rules``, which must succeed."""
    files = [str(path) for path in sorted(RULES.glob("*.yaml"))]
    path = directory / "test.yaml"
    text = {"rule_files": files, "evaluation_interval": "15s", "tests": tests}
    path.write_text(yaml.safe_dump(text | {"group_eval_order": [group["name"] for group in _recording_first()]}))
    checked = subprocess.run(
        ["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False, timeout=120
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    return checked.stdout


def _recording_first() -> list[dict[str, Any]]:
    return sorted(rule_groups(), key=lambda group: group["name"] != "gspo-recording")


def expected(name: str, fault: Fault) -> dict[str, Any]:
    """The alert that promtool expects: all its labels and both texts."""
    return {
        "exp_labels": {**fault.labels, "severity": ALERTS[name]["labels"]["severity"]},
        "exp_annotations": {
            "summary": fault.summary,
            "description": fault.description,
            "runbook_url": ALERTS[name]["annotations"]["runbook_url"],
        },
    }


def at(name: str, minutes: float, alerts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"eval_time": f"{int(minutes * 60)}s", "alertname": name, "exp_alerts": alerts}


def changed(changes: Series) -> Series:
    base = healthy()
    unknown = set(changes) - set(base)
    assert not unknown, f"the healthy run has no {unknown}"
    return base | changes


def test_there_is_a_fault_for_each_alert() -> None:
    assert list(FAULTS) == list(ALERTS)


@needs_promtool
def test_the_rules_are_valid() -> None:
    subprocess.run(["promtool", "check", "rules", *map(str, RULES.glob("*.yaml"))], check=True, timeout=60)


@needs_promtool
def test_in_a_healthy_hour_nothing_fires(tmp_path: Path) -> None:
    checks = [at(name, minutes, []) for name in ALERTS for minutes in (5, 20, 45, 59)]
    promtool(tmp_path, [as_test(healthy(), checks)])


@needs_promtool
def test_a_start_of_forty_minutes_sets_nothing_off(tmp_path: Path) -> None:
    names = ("GspoProcessDown", "GspoProcessMissing", "GspoLearnerAway", "GspoNoRollouts", "GspoNoProgress", "GspoNotBegun")
    checks = [at(name, minutes, []) for name in names for minutes in (5, 20, 39, 43, 45, 46, 47, 49)]
    promtool(tmp_path, [as_test(changed(STARTING), checks)])


@needs_promtool
def test_a_pause_sets_nothing_off(tmp_path: Path) -> None:
    names = ("GspoProcessDown", "GspoProcessMissing", "GspoLearnerAway", "GspoNoRollouts", "GspoNoProgress", "GspoNotBegun")
    checks = [at(name, minutes, []) for name in names for minutes in (19, 21, 24, 27, 33, 36, 39, 44, 50, 59)]
    promtool(tmp_path, [as_test(changed(PAUSED), checks)])


@needs_promtool
def test_a_rollout_that_dies_sets_off_its_own_alert_and_no_other(tmp_path: Path) -> None:
    dead = {
        series("up", "", OTHER): then("1", 20, 0),
        series("gspo_broker_rollouts", 'status="serving"', BROKER): "2+0x79 1+0x160",
    }
    fault = FAULTS["GspoProcessDown"]
    others = [at(name, minutes, []) for name in ALERTS if name != "GspoProcessDown" for minutes in (22, 30, 45)]
    promtool(tmp_path, [as_test(changed(dead), [at("GspoProcessDown", 22, [expected("GspoProcessDown", fault)]), *others])])


@needs_promtool
@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_fires_after_its_wait_and_names_the_measured_value(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    checks = [at(name, fault.minutes, [expected(name, fault)])]
    if fault.quiet_minutes is not None:
        checks.append(at(name, fault.quiet_minutes, []))
    promtool(tmp_path, [as_test(changed(fault.changes), checks)])


@needs_promtool
def test_failed_handshakes_are_reported_when_they_outnumber_successful_ones(tmp_path: Path) -> None:
    name = "GspoConnectionsRefused"
    knocking = series("gspo_broker_refused_connections_total", 'reason="handshake"', BROKER)
    fault = Fault(
        {},
        minutes=30,
        summary="The broker refuses connections: handshake",
        description="40 connections in 10 minutes, reason: handshake.",
        labels={"namespace": "run", "component": "broker", "reason": "handshake"},
    )
    promtool(tmp_path, [as_test(changed({knocking: rising(1)}), [at(name, 30, [expected(name, fault)])])])
    promtool(tmp_path, [as_test(changed({knocking: rising(0.4)}), [at(name, 30, [])])])


@needs_promtool
def test_an_unknown_key_at_a_rollout_that_shares_weights_is_reported(tmp_path: Path) -> None:
    name = "GspoConnectionsRefused"
    fault = Fault(
        {},
        minutes=22,
        summary="The rollout refuses connections: unknown_key",
        description="3 connections in 10 minutes, reason: unknown_key.",
        labels={"namespace": "run", "component": "rollout", "reason": "unknown_key"},
    )
    stranger = {series("gspo_rollout_refused_connections_total", 'reason="unknown_key"', OTHER): then("1", 20, 4)}
    promtool(tmp_path, [as_test(healthy() | stranger, [at(name, 19, []), at(name, 22, [expected(name, fault)])])])


@needs_promtool
@pytest.mark.parametrize("name", EXCUSED)
def test_a_run_that_is_over_sets_nothing_off(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    promtool(tmp_path, [as_test(changed({**fault.changes, **OVER}), [at(name, fault.minutes, [])])])


@needs_promtool
def test_a_rule_that_does_not_fire_fails_its_test(tmp_path: Path) -> None:
    fault = FAULTS["GspoNoRollouts"]
    with pytest.raises(AssertionError, match="GspoNoRollouts"):
        promtool(tmp_path, [as_test(healthy(), [at("GspoNoRollouts", fault.minutes, [expected("GspoNoRollouts", fault)])])])

"""An hour of a run as series for promtool: healthy, or with one fault."""

from typing import Any

INTERVAL_S = 15
LENGTH = 240
"""Samples of a series: one hour."""

Series = dict[str, str]


def steady(value: float) -> str:
    return f"{value:g}+0x{LENGTH}"


def rising(a_sample: float, start: float = 0) -> str:
    return f"{start:g}+{a_sample:g}x{LENGTH}"


def gone_after(values: float, minutes: int) -> str:
    """A value for some minutes, then no samples."""
    return f"{values:g}+0x{minutes * 60 // INTERVAL_S - 1} _x{LENGTH}"


def then(first: str, minutes: int, second: float) -> str:
    """A value for some minutes, then another."""
    return f"{first}+0x{minutes * 60 // INTERVAL_S - 1} {second:g}+0x{LENGTH}"


def target(name: str) -> str:
    """The labels of a process's target."""
    component = name.partition("-")[0]
    return f'namespace="run",component="{component}",pod="{name}",instance="{name}:1",job="gspo"'


BROKER, LEARNER, ROLLOUT, OTHER, SANDBOX = (
    target(name) for name in ("broker-0", "learner-0", "rollout-0", "rollout-1", "sandbox-0")
)


def series(metric: str, labels: str, of: str) -> str:
    return f"{metric}{{{labels}{',' if labels else ''}{of}}}"


def healthy() -> Series:
    """A healthy run: two rollouts, 20 groups a batch, a batch a minute; the learner waits a third of its time."""
    made: Series = {series("up", "", of): steady(1) for of in (BROKER, LEARNER, ROLLOUT, OTHER, SANDBOX)}
    gauges: dict[str, float] = {
        "gspo_broker_stopping": 0,
        "gspo_broker_lag_mean_versions": 1.2,
        "gspo_broker_lag_max_versions": 2,
        "gspo_broker_max_lag_versions": 2,
        "gspo_broker_zero_advantage_groups": 6,
        "gspo_broker_batch_groups": 20,
        "gspo_broker_policy_version": 30,
        "gspo_broker_disk_free_bytes": 60e9,
        "gspo_broker_disk_bytes": 100e9,
        "gspo_broker_queue_messages": 12,
        "gspo_broker_quiet_seconds": 30,
        "gspo_broker_damaged_rows": 0,
        "gspo_broker_log_bytes": 4e6,
    }
    made |= {series(name, "", BROKER): steady(value) for name, value in gauges.items()}
    made[series("gspo_broker_commit_failures_total", "", BROKER)] = steady(3)
    made[series("gspo_broker_archive_failures_total", "", BROKER)] = steady(1)
    for standing in ("slowed", "shut_out"):
        made[series("gspo_broker_limited_peers", f'standing="{standing}"', BROKER)] = steady(0)
    made[series("gspo_broker_peers", 'role="learner"', BROKER)] = steady(1)
    for status, number in {"serving": 2, "starting": 0, "verifying": 0, "quarantined": 0, "silent": 0}.items():
        made[series("gspo_broker_rollouts", f'status="{status}"', BROKER)] = steady(number)
    for reason in ("stale", "failed"):
        made[series("gspo_broker_dropped_groups_total", f'reason="{reason}"', BROKER)] = steady(2)
    made[series("gspo_broker_quarantined_batches_total", "", BROKER)] = steady(1)
    for server, of in (("broker", BROKER), ("learner", LEARNER)):
        made[series(f"gspo_{server}_refused_connections_total", 'reason="unknown_key"', of)] = steady(1)
        made[series(f"gspo_{server}_refused_connections_total", 'reason="handshake"', of)] = rising(0.1)
        made[series(f"gspo_{server}_connections_total", 'outcome="admitted"', of)] = rising(0.5)
    made[series("gspo_learner_wait_seconds_total", "", LEARNER)] = rising(5)
    made[series("gspo_learner_weight_loads_failed_total", "", LEARNER)] = steady(1)
    made[series("gspo_learner_damaged_checkpoint_files", "", LEARNER)] = steady(0)
    for name, bucket, value in (
        ("mismatch_kl", "lag_0", 0.001),
        ("calibration_bias", "lag_1", 0.2),
        ("clip_fraction", "all", 0.15),
        ("optimizer_steps", "", 4),
    ):
        made[series("gspo_learner_diagnostic", f'name="{name}",bucket="{bucket}"', LEARNER)] = steady(value)
    for ending, a_sample in {"exit": 1500, "wall": 30, "failed": 0.01}.items():
        made[series("gspo_sandbox_runs_total", f'ending="{ending}"', SANDBOX)] = rising(a_sample)
    made[series("gspo_sandbox_turned_away_total", 'reason="failed"', SANDBOX)] = rising(0.01)
    made[series("gspo_sandbox_waiting", "", SANDBOX)] = steady(0)
    for of in (ROLLOUT, OTHER):
        made[series("gspo_rollout_status", 'status="serving"', of)] = steady(1)
        made[series("gspo_rollout_policy_version", "", of)] = steady(29)
        made[series("gspo_rollout_tokens_total", 'kind="action"', of)] = rising(3000)
        made[series("gspo_rollout_weight_updates_total", 'outcome="not_fetched"', of)] = steady(1)
        made[series("gspo_rollout_weights_damaged_total", "", of)] = then("0", 8, 1) if of == OTHER else steady(2)
        for outcome, a_sample in (("fetched", 0.25), ("failed", 0.05), ("damaged", 0.0)):
            made[series("gspo_rollout_weight_sources_total", f'outcome="{outcome}"', of)] = rising(a_sample)
        for outcome, a_sample in (("done", 40.0), ("failed", 1.0), ("engine_error", 0.0)):
            made[series("gspo_rollout_episodes_total", f'outcome="{outcome}"', of)] = rising(a_sample)
    return made


def as_test(made: Series, rules: list[dict[str, Any]]) -> dict[str, Any]:
    """One entry of a promtool test file."""
    return {
        "interval": f"{INTERVAL_S}s",
        "input_series": [{"series": name, "values": values} for name, values in made.items()],
        "alert_rule_test": rules,
    }

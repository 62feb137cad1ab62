"""The signal on hand-made scrapes, the rule in Prometheus on the same ones, and the measures of a run."""

import math
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from benchmarks.autoscaling.config import Config
from benchmarks.autoscaling.control import Run, simulate
from benchmarks.autoscaling.hpa import Behavior, deployed
from benchmarks.autoscaling.measures import outcome
from benchmarks.autoscaling.signals import History, Scrape, Wanted, queue_length, rate, utilisation

RULES = Path(__file__).parents[3] / "deploy" / "monitoring" / "rules" / "autoscaling.yaml"
MAX_RUNNING, MAX_LAG = 8, 4
CASES = {
    # serving, running each, waiting, lag: wanted
    "a learner that waits for half of its time wants twice the busy rollouts": (10, 8, 0.5, 2.0, 22.0),
    "of one rollout it wants eight at most": (1, 8, 0.97, 0.5, 1.1 * 8),
    "waiting for old groups with idle rollouts is no reason for more": (10, 4, 0.4, 3.9, 1.1 * 5 / 0.6),
    "nor, while lag is low, for fewer": (10, 4, 0.4, 1.0, 10.0),
    "complete groups that wait and idle rollouts: fewer": (20, 4, 0.0, 3.5, 11.0),
    "the same below three quarters of max_lag: as many as serve": (20, 4, 0.0, 2.9, 20.0),
    "a learner that hardly waits: as many as serve": (12, 8, 0.04, 2.0, 12.0),
    "before the first batch the lag is not known": (2, 8, 1.0, math.nan, 1.1 * 16),
    "nor is there a reason for fewer before it": (2, 1, 0.0, math.nan, 2.0),
}


def history(serving: int, running: int, waiting: float, lag: float) -> History:
    """Return twenty minutes without any change."""
    return History(
        MAX_LAG,
        MAX_RUNNING,
        8,
        [
            Scrape(
                at=at,
                wait_s=100 + waiting * at,
                serving=serving,
                running=running * serving,
                generating=serving,
                outstanding=30,
                lag=lag,
            )
            for at in range(0, 1201, 15)
        ],
    )


@pytest.mark.parametrize("name", CASES)
def test_what_is_wanted(name: str) -> None:
    serving, running, waiting, lag, wanted = CASES[name]
    assert Wanted()(history(serving, running, waiting, lag), 1210.0) == pytest.approx(wanted, rel=1e-3)


@pytest.mark.monitoring
@pytest.mark.parametrize("name", CASES)
def test_the_rule_in_prometheus_wants_the_same(name: str, tmp_path: Path) -> None:
    serving, running, waiting, lag, _ = CASES[name]
    wanted = Wanted()(history(serving, running, waiting, lag), 1200.0)
    namespace = 'namespace="run"'
    series = {
        f"gspo_learner_wait_seconds_total{{{namespace}}}": f"100+{15 * waiting:g}x80",
        f"gspo_broker_lag_mean_versions{{{namespace}}}": " ".join(["NaN" if math.isnan(lag) else str(lag)] * 81),
        f"gspo_broker_max_lag_versions{{{namespace}}}": f"{MAX_LAG}x80",
    }
    for pod in range(serving):
        series[f'gspo_rollout_policy_version{{{namespace},pod="rollout-{pod}"}}'] = "7x80"
        series[f'gspo_rollout_episodes_running{{{namespace},pod="rollout-{pod}"}}'] = f"{running}x80"
        series[f'gspo_rollout_episodes_limit{{{namespace},pod="rollout-{pod}"}}'] = f"{MAX_RUNNING}x80"
    # A starting rollout has no weights and no work.
    series[f'gspo_rollout_policy_version{{{namespace},pod="starting"}}'] = "0x80"
    series[f'gspo_rollout_episodes_running{{{namespace},pod="starting"}}'] = "0x80"
    asked = {
        "expr": f"abs(gspo_rollouts_wanted / {wanted} - 1) < bool 0.002",
        "eval_time": "20m",
        "exp_samples": [{"labels": f"{{{namespace}}}", "value": 1}],
    }
    test = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "15s",
                "input_series": [{"series": key, "values": values} for key, values in series.items()],
                "promql_expr_test": [asked],
            }
        ],
    }
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump(test))
    checked = subprocess.run(
        ["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False, timeout=60
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_without_rollouts_that_serve_nothing_is_said() -> None:
    assert Wanted()(history(0, 0, 1.0, 1.0), 1210.0) is None
    assert Wanted()(History(MAX_LAG, MAX_RUNNING, 8), 0.0) is None


def test_the_others_say_what_they_are_told_to() -> None:
    state = history(10, 8, 0.5, 2.0)
    assert utilisation(state, 1210.0) == pytest.approx(10 / 0.8)
    assert queue_length(state, 1210.0) == pytest.approx(30 * 8 / 6)


def test_a_rate_is_extrapolated_to_the_edges_that_samples_come_near() -> None:
    # Samples at 15 .. 300 s, 2 a second: the range begins 15 s before the first one.
    full = [(float(at), 1000.0 + 2 * at) for at in range(15, 301, 15)]
    assert rate(full, 300.0, 300.0) == pytest.approx(2.0)
    # A series that exists only for the last 60 s counts for those and half an interval before them, no more.
    young = [(float(at), 1000.0 + 2 * (at - 240)) for at in range(240, 301, 15)]
    assert rate(young, 300.0, 300.0) == pytest.approx(2 * 67.5 / 300)
    # And not below zero.
    assert rate([(at, value - 1000) for at, value in young], 300.0, 300.0) == pytest.approx(2 * 60 / 300)
    assert rate(full[:1], 300.0, 300.0) is None


def made_run(pods: list[int], waiting: list[float]) -> Run:
    """A sample each 15 s."""
    config = Config()
    total, scrapes = 0.0, []
    for index, share in enumerate(waiting):
        scrapes.append(Scrape(at=index * 15.0, wait_s=total, serving=1, running=1, generating=1, outstanding=1, lag=1.0))
        total += share * 15
    return Run(
        config=config,
        duration_s=15.0 * (len(pods) - 1),
        scrapes=scrapes,
        replicas=[(index * 15.0, number) for index, number in enumerate(pods)],
        batches=[],
        pod_s=[0.0] * len(scrapes),
        num_lost=0,
        tokens_lost=0.0,
    )


def test_a_run_is_settled_when_the_learner_waits_little_for_a_quarter_of_an_hour() -> None:
    run = made_run([1] * 481, [1.0] * 120 + [0.0] * 361)
    # Below 5 % in a window that begins 44 s before the wait ends, at the sample after that.
    assert outcome(run, 3600.0).settle_min == pytest.approx((1800 - 30) / 60)
    assert outcome(made_run([1] * 481, [0.5] * 481), 3600.0).settle_min == math.inf
    assert outcome(run, 3600.0).waiting == 0.0


def test_turns_overshoot_and_spread_are_those_of_the_pods() -> None:
    pods = [60] * 100 + [40] * 141 + [20] * 60 + [24] * 60 + [20] * 60 + [22] * 60
    measured = outcome(made_run(pods, [0.0] * 481), 3600.0)
    assert measured.turns_per_hour == 3.0
    mean = (40 + 20 * 120 + 24 * 60 + 22 * 60) / 241
    assert measured.pods == pytest.approx(mean)
    assert measured.overshoot == pytest.approx(60 / mean)
    assert measured.spread == pytest.approx(4 / mean)


def test_from_one_pod_the_deployed_autoscaler_settles_near_the_size_that_the_learner_can_use() -> None:
    config = replace(Config(), groups_per_batch=16)
    run = simulate(config, signal=Wanted(), behavior=deployed(64), replicas=1, duration_s=7200.0, seed=0)
    measured = outcome(run, 1800.0)
    assert measured.waiting < 0.05
    assert config.fluid_size() * 0.95 < measured.pods < config.fluid_size() * 1.35
    assert measured.settle_min < 45


def test_gpu_utilisation_scales_to_the_bound_whatever_the_learner_can_use() -> None:
    config = replace(Config(), groups_per_batch=16)
    behavior = Behavior(max_replicas=32)
    run = simulate(config, signal=utilisation, behavior=behavior, replicas=4, duration_s=5400.0, seed=0)
    assert run.replicas[-1][1] > 1.5 * config.fluid_size()

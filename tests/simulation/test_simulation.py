"""Whole runs in all weathers: no promise is broken, and the weather really happened."""

import re
from collections import Counter

import pytest

from tests.simulation.__main__ import told
from tests.simulation.bugs import BUGS, planted
from tests.simulation.search.shrink import shrink
from tests.simulation.weather import plan_of
from tests.simulation.world import Outcome, simulate

NUM_SEEDS = 60
pytestmark = pytest.mark.timeout(900)
"""The seeds take over a minute where nothing else runs."""
OFTEN = 2
"""How often each kind of weather must have come in these seeds."""
RARE = ("all tasks rest", "step diverged")
"""What comes once is enough."""
KINDS = (
    "kill broker", "kill learner", "kill rollout", "terminate broker", "terminate learner", "terminate rollout",
    "suspend broker", "suspend learner", "suspend rollout", "standstill", "partition", "half_open", "loss", "duplication",
    "slow",
    "disk_full", "engine_fails", "engine_fails_update", "engine_damages", "engine_dies", "rewards_fail", "leave", "join",
    "second_learner", "takeover", "second_rollout", "corrupt", "damage", "damage_checkpoint", "poison", "requeue", "restore",
    "engine_lies", "stop",
)  # fmt: skip
CONSEQUENCES = (
    "message lost", "message duplicated", "connection given up", "reconnected", "window full", "commit refused by the disk",
    "trajectory resumed", "lease of begun trajectory", "batch delivered again", "batch trained again",
    "group dropped: stale", "group dropped: failed", "evaluation done", "weights replaced under episodes",
    "batch assembled before its version was announced",
    "weights changed within a piece", "weights damaged", "engine failed", "engine failed in an update", "reward failed",
    "weights patched in place",
    "log: lease_expired", "log: lease_of_former_session_ended", "log: session_replaced", "log: handshake_again",
    "log: resumed", "log: checkpoint_damaged", "the same weights under their number again", "second learner turned away",
    "learner took over", "rollout was replaced",
    "snapshot fetched", "delta fetched", "chunk of weights damaged", "damaged weights found", "weight_peer: fetched",
    "weight_peer: failed", "weight_peer: damaged",
    "damage refused: old copy", "damage refused: row", "damage without loss: old mark", "loss accepted",
    "learner could not train its batch", "learner died of its batch", "quarantined: raises", "quarantined: dies",
    "quarantined: unreadable", "batch skipped", "prompt sampled again", "group archived",
    "restored whole", "restored to an earlier batch", "run stopped",
    "engine lied: token", "engine lied: logprob", "engine lied: version", "reward absurd",
    "components trained", "group compared", "compared group trained",
    "journal resumed", "group filtered out", "filter limit", "task passed over",
    "task rests", "all tasks rest",
    "call asked again", "call replayed", "call continued", "step replayed", "step diverged", "turns discarded",
    "several sequences trained",
    "batch in several parts", "part delivered again", "part of a batch damaged", "many chunks in a message",
)  # fmt: skip


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return [simulate(plan_of(seed)) for seed in range(NUM_SEEDS)]


@pytest.fixture(scope="module")
def happened(outcomes: list[Outcome]) -> Counter[str]:
    return sum((outcome.happened for outcome in outcomes), Counter())


def test_no_promise_is_broken_in_any_weather_and_every_run_completes(outcomes: list[Outcome]) -> None:
    broken = [outcome for outcome in outcomes if outcome.violation is not None]
    if broken:
        seeds = [outcome.plan.seed for outcome in broken]
        pytest.fail(f"seeds {seeds}; the first one, shortened:\n{told(shrink(broken[0], max_runs=40))}")
    assert all(outcome.happened["run complete"] == 1 for outcome in outcomes)


# 586: two rollouts start again at their addresses and are referred to each other. 836: a learner says Goodbye in the round
# in which the next one is welcomed. 961: in the one in which it says Hello again.
@pytest.mark.parametrize("seed", [586, 836, 961])
def test_a_seed_that_once_broke_a_promise_breaks_none(seed: int) -> None:
    outcome = simulate(plan_of(seed, may_be_stopped=False))
    assert outcome.violation is None, told(outcome)


@pytest.mark.parametrize("kind", KINDS)
def test_the_weather_really_happened(kind: str, happened: Counter[str]) -> None:
    assert happened[kind] >= OFTEN


@pytest.mark.parametrize("consequence", CONSEQUENCES)
def test_the_weather_had_its_consequences(consequence: str, happened: Counter[str]) -> None:
    assert happened[consequence] >= (1 if consequence in RARE else OFTEN)


def test_a_process_was_killed_at_each_of_the_worst_moments(happened: Counter[str]) -> None:
    struck = {name for name in happened if name.startswith("killed when ")}
    assert struck >= {
        f"killed when {point}"
        for point in (
            "chunk received", "committed", "acknowledged", "lease sent", "grade sent", "graded received",
            "batch sent", "part sent", "publishing", "saving",
            "loading", "archive written", "archived", "batch failed",
            "publication received", "report received", "checkpoint received", "welcomed",
        )
    }  # fmt: skip


@pytest.mark.parametrize("agents", [False, True])
def test_a_seed_gives_exactly_the_same_history_again(agents: bool) -> None:
    def lines(outcome: Outcome) -> list[str]:
        # Only the run's directory differs.
        return [re.sub(r"gspo-simulation-\w+", "", str(line)) for line in outcome.history]

    plans = (plan_of(seed) for seed in range(50))
    plan = next(plan for plan in plans if len(plan.events) > 8 and bool(plan.agents) == agents)
    first, second = simulate(plan), simulate(plan)
    assert lines(first) == lines(second)
    assert len(first.history) > 100
    assert first.happened == second.happened


def test_a_failing_run_is_shortened_to_what_it_needs() -> None:
    bug = next(bug for bug in BUGS if bug.name == "a version is served before its digest is noted")
    with planted(bug):
        runs = (simulate(bug.plan(seed)) for seed in range(bug.seed, bug.seed + 40))
        failing = next(outcome for outcome in runs if outcome.violation is not None)
        assert failing.violation is not None
        short = shrink(failing, max_runs=25)
        assert short.violation is not None
        assert short.violation.invariant == failing.violation.invariant
        assert len(short.plan.events) < len(failing.plan.events)
    assert any("broker" in event.target for event in short.plan.events)
    text = told(short)
    assert f"broken: {failing.violation.invariant}" in text
    assert "weather" in text

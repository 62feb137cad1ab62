"""What the doctor says: the cause, and what to do."""

import re
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest

from gspo_services.cli.doctor.command import report
from gspo_services.cli.doctor.damage import Holder
from gspo_services.cli.doctor.diagnosis import diagnose
from gspo_services.cli.doctor.observe import LedgerState, Log, Observation
from gspo_services.cli.requeue import QuarantinedBatch
from gspo_services.runs.learning import ShownAnswer
from gspo_services.shared.learning import LearningWatch
from gspo_services.shared.runtime.console import PlainConsole
from gspo_services.shared.settings.sections import Rollout
from tests.support.cli.pages import A_LEDGER, GIB, HEALTHY, SETTINGS, a_page, a_rollout, a_status, batches_at, without_broker


def quarantined(batch: int, waiting: int) -> QuarantinedBatch:
    return QuarantinedBatch(batch=batch, policy_version=9, reason="the loss is nan", waiting=waiting, requeued=0, at=None)


def wrong(seen: Observation) -> list[str]:
    return [remark.text for remark in diagnose(seen) if remark.wrong]


def with_rollout(**changes: Any) -> Observation:
    rollouts = [a_rollout("rollout-0"), a_rollout("rollout-1", **changes)]
    return replace(HEALTHY, status=a_status(rollouts=rollouts))


def test_a_healthy_run_has_nothing_wrong_and_says_what_it_waits_for() -> None:
    assert wrong(HEALTHY) == []
    (remark,) = diagnose(HEALTHY)
    assert remark.text == (
        "batch 3 of 60 waits for 20 more complete groups: 12 of 32 are ready, 128 trajectories under way, 4 free"
    )


NOT_READY = {"rollout-1": a_page(False, "model.embed: the engine has another checksum")}
CASES: list[tuple[str, Observation, str]] = [
    ("disk", replace(HEALTHY, free_bytes={"run.directory (runs/x)": (5 << 20, 100 * GIB)}), "has 5 MiB free: make room"),
    ("error", replace(HEALTHY, status=a_status(error="20 groups in a row failed")), "failed: 20 groups in a row failed"),
    (
        "quarantined",
        replace(HEALTHY, ledger=replace(A_LEDGER, quarantined=(quarantined(7, 4), quarantined(9, 4), quarantined(8, 0)))),
        "batch 9 (4 groups) was quarantined at version 9, and the run goes on without it: the loss is nan. So were 1 "
        "others: `gspo requeue runs/x` lists them. Find the cause; then `gspo requeue runs/x all` requeues them",
    ),
    (
        "no learner",
        replace(HEALTHY, status=a_status(learner=None)),
        "no learner is connected: start it (`gspo learner CONFIG`)",
    ),
    (
        "learner not ready",
        replace(HEALTHY, pages={"learner": a_page(False, "no progress")}),
        "learner is not ready: no progress",
    ),
    (
        "broker not ready",
        replace(HEALTHY, pages={"broker": a_page(False, "disk is full")}),
        "the broker is not ready: disk is full",
    ),
    (
        "rollout missing",
        replace(HEALTHY, status=a_status(rollouts=[a_rollout("rollout-0")])),
        "rollout-1 is not connected; it says: ready: it joins by itself",
    ),
    (
        "rollout silent",
        with_rollout(silent_s=31.0),
        "rollout-1 has been silent for 31 s: its process, host or network is stuck",
    ),
    (
        "quarantined",
        replace(with_rollout(status="quarantined"), pages=NOT_READY),
        "quarantined: model.embed: the engine has another",
    ),
    (
        "old version",
        with_rollout(policy_version=1),
        "serves version 1, but the newest is 4: too old for new work (batch.max_lag = 2)",
    ),
    ("rollout not ready", replace(HEALTHY, pages=NOT_READY), "rollout-1 is not ready: model.embed"),
    (
        "no batch",
        replace(HEALTHY, status=a_status(quiet_s=600.0), batches=batches_at(70.0, 85.0, 100.0)),
        "no batch was trained for 600 s; earlier batches took 15 s each",
    ),
    (
        "turned away",
        without_broker(turned_away=True, no_status="protocol_version is 2"),
        "turns this command away: protocol_version",
    ),
    (
        "someone else",
        without_broker(pages={"broker": a_page()}),
        "does not answer on tcp://127.0.0.1:7002: another run's broker",
    ),
    (
        "no ledger",
        without_broker(ledger=None, no_ledger="runs/x is no run directory"),
        "and no ledger: runs/x is no run directory",
    ),
    ("no broker", without_broker(), "the broker is not running. 3 of 60 batches are trained"),
    (
        "broker's last words",
        without_broker(logs={"broker": Log(event="cannot_start", age_s=9.0, error="port 7002 is in use")}),
        "the broker is not running. It ended with: port 7002 is in use. 3 of 60",
    ),
]


@pytest.mark.parametrize(("seen", "words"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_only_what_is_wrong_is_said(seen: Observation, words: str) -> None:
    (text,) = wrong(seen)
    assert words in text


def test_a_run_that_starts_no_rollouts_asks_for_one() -> None:
    settings = SETTINGS.model_copy(update={"rollout": Rollout(num_servers=0)})
    (text,) = wrong(replace(HEALTHY, settings=settings, status=a_status(rollouts=[])))
    assert text.startswith("no rollout is connected: start one")
    assert wrong(replace(HEALTHY, settings=settings, status=a_status(rollouts=[a_rollout("pod-7")]))) == []


def test_a_start_or_an_end_is_nothing_wrong() -> None:
    assert wrong(with_rollout(status="starting", policy_version=0)) == []
    assert wrong(replace(HEALTHY, status=a_status(stopping="stopped by me", waiting_for=""))) == []
    ended = replace(HEALTHY, status=a_status(finished=True, learner=None, rollouts=[]))
    assert [remark.text for remark in diagnose(ended)] == ["the run has ended after 3 batches (all are trained)"]
    complete = without_broker(ledger=LedgerState(batches=60, trained=60, version=61, groups={}))
    assert [remark.text for remark in diagnose(complete)] == [
        "the run is complete: 60 of 60 batches are trained, and no process is running"
    ]


def test_groups_filtered_out_are_counted_and_their_limit_is_a_remark() -> None:
    groups = HEALTHY.status["groups"] | {"filtered": 40} if HEALTHY.status is not None else {}
    some = replace(HEALTHY, status=a_status(groups=groups, filtered={"groups": 3, "limit": 256}))
    assert [remark.wrong for remark in diagnose(some) if "zero-advantage" in remark.text] == [False]
    most = replace(HEALTHY, status=a_status(groups=groups, filtered={"groups": 256, "limit": 256}))
    texts = [remark.text for remark in diagnose(most) if remark.wrong]
    assert len(texts) == 1
    assert texts[0].startswith(
        "batch 3 has filtered out 256 zero-advantage groups, the most that data.max_filtered = 8 allows"
    )


def test_drops_are_explained() -> None:
    texts = [remark.text for remark in diagnose(replace(HEALTHY, status=a_status(dropped={"failed": 2, "stale": 1})))]
    assert texts[0].startswith("2 groups were dropped as failed: the rollouts' logs say why")
    assert texts[1].startswith("1 groups were dropped as stale: the learner restarted with other weights")


def test_a_slow_batch_is_compared_with_the_usual_pace() -> None:
    def seen(*ages_s: float, quiet_s: float | None = None) -> Observation:
        status = a_status(quiet_s=ages_s[-1] if quiet_s is None else quiet_s)
        return replace(HEALTHY, batches=batches_at(*(10_000.0 - age_s for age_s in ages_s)), status=status)

    assert wrong(seen(1500.0, 1000.0, 500.0)) == []
    assert wrong(seen(100.0, 99.5, 99.0)) == []
    assert wrong(seen(9000.0, 8000.0)) == []
    assert wrong(seen(9000.0, 8999.0, quiet_s=5.0)) == [], "the broker was started again a moment ago"
    (text,) = wrong(seen(9000.0, 8999.0))
    assert text == "no batch was trained for 8999 s; earlier batches took 1 s each"


@pytest.mark.parametrize(
    ("ages_s", "states", "quiet_s", "remarkable"),
    [
        ([], ["serving", "starting"], 121.0, True),
        ([], ["serving", "starting"], 119.0, False),
        ([500.0], ["serving"], 121.0, True),
        ([], ["starting", "verifying"], 299.0, False),
        ([], ["starting", "verifying"], 301.0, True),
    ],
)
def test_a_first_batch_that_does_not_come_is_remarked_on(
    ages_s: list[float], states: list[str], quiet_s: float, remarkable: bool
) -> None:
    rollouts = [a_rollout(f"rollout-{index}", status=state) for index, state in enumerate(states)]
    settings = SETTINGS.model_copy(update={"rollout": Rollout(num_servers=len(states))})
    status = a_status(rollouts=rollouts, quiet_s=quiet_s, batches_trained=len(ages_s))
    said = wrong(replace(HEALTHY, settings=settings, status=status, batches=batches_at(*ages_s)))
    assert [text.startswith(f"no batch was trained for {quiet_s:.0f} s, and there is no earlier pace") for text in said] == [
        True
    ] * remarkable


@pytest.mark.parametrize("changes", [{"batches_trained": 60}, {"stopping": "stopped by me"}])
def test_no_batch_is_missed_once_the_run_needs_none(changes: dict[str, Any]) -> None:
    assert wrong(replace(HEALTHY, status=a_status(quiet_s=9000.0, **changes))) == []


def test_a_repeated_warning_is_remarked_on() -> None:
    def remarks(**warnings: int) -> list[tuple[str, bool]]:
        logs = {"learner": Log(event="x", age_s=1.0, error="", warnings=warnings)}
        return [(remark.text, remark.wrong) for remark in diagnose(replace(HEALTHY, logs=logs)) if "learner" in remark.text]

    assert remarks(weights_not_fetched=5) == []
    assert remarks(weights_not_fetched=6) == [
        ("learner keeps warning: weights_not_fetched, 6 times within 120 s; see its log", False)
    ]
    ((text, is_wrong),) = remarks(message_for_another_session=1)
    assert is_wrong
    assert text.startswith("learner gets answers that are meant for another process with its name")


def test_a_silent_learner_and_a_waiting_one_are_remarked_on() -> None:
    quiet = replace(HEALTHY, status=a_status(learner_silent_s=31.0, learner_waiting=None))
    (remark,) = [remark for remark in diagnose(quiet) if remark.wrong]
    assert "the learner has been silent for 31 s" in remark.text
    two = replace(HEALTHY, status=a_status(learner_silent_s=0.3, learner_session="a", learner_waiting="b"))
    (remark,) = [remark for remark in diagnose(two) if remark.wrong]
    assert remark.text.startswith("a second learner (session b) waits while session a has the run")


def said(seen: Observation) -> tuple[int, str]:
    output = StringIO()
    return report(seen, PlainConsole(file=output, width=200)), output.getvalue()


def test_nothing_is_wrong_only_when_everything_could_be_looked_at() -> None:
    assert said(HEALTHY) == (0, said(HEALTHY)[1])
    assert said(HEALTHY)[1].endswith("\nnothing is wrong\n")
    for seen, what in (
        (replace(HEALTHY, ledger=None, no_ledger="ledger.sqlite3 is damaged"), "the ledger: ledger.sqlite3 is damaged"),
        (
            replace(HEALTHY, unread=["runs/x/logs/broker.log (Permission denied)"]),
            "runs/x/logs/broker.log (Permission denied)",
        ),
        (replace(HEALTHY, pages={**HEALTHY.pages, "learner": a_page(None, "no answer")}), "learner's page: no answer"),
        (
            replace(HEALTHY, pages={"broker": a_page(), "learner": a_page()}),
            "rollout-1's page: its address is not known here",
        ),
    ):
        status, text = said(seen)
        assert status == 0
        assert f"not checked: {what}\n" in text
        assert text.endswith("\nnothing is wrong in what could be checked\n")


def test_processes_that_do_not_run_are_no_unread_pages() -> None:
    pages = {name: replace(a_page(None, "nothing listens at http://x"), nobody=True) for name in ("broker", "learner")}
    assert "not checked" not in said(without_broker(pages=pages))[1]
    text = said(replace(HEALTHY, pages={**HEALTHY.pages, **pages}))[1]
    assert "not checked: learner's page: nothing listens at http://x\n" in text
    elsewhere = said(without_broker(pages=pages, turned_away=True))[1]
    assert "not checked: broker's page: nothing listens at http://x\n" in elsewhere


def test_a_suspended_broker_is_not_to_be_started_and_a_damaged_ledger_is_named() -> None:
    (text,) = wrong(without_broker(holder=Holder(pid=17, suspended=True)))
    assert "the broker is suspended: process 17 holds the ledger's lock" in text
    assert "kill -CONT 17" in text
    (text,) = wrong(without_broker(holder=Holder(pid=17, suspended=False)))
    assert "process 17 holds the ledger's lock: it is starting, stuck" in text
    (text,) = wrong(without_broker(damage="ledger.sqlite3: 3 commits are lost"))
    assert text == "the run's files are damaged: ledger.sqlite3: 3 commits are lost"
    assert wrong(replace(HEALTHY, damage="a row of groups")) == ["the run's files are damaged: a row of groups"]


def test_peers_that_are_limited_are_named_with_what_they_did() -> None:
    one = {"peer": "rollout-7", "standing": "slowed", "reason": "refused", "what": "refused messages", "per_minute": 40}
    key = {"peer": "the key rollout-b", "standing": "shut_out", "reason": "messages", "what": "requests", "per_minute": 9000}
    limited = [{**one, "seconds": None}, {**key, "seconds": 41.5}]
    slowed, shut_out = [remark for remark in diagnose(replace(HEALTHY, status=a_status(limited=limited))) if remark.wrong]
    assert slowed.text.startswith("rollout-7 is slowed: 40 refused messages within the last minute; it gets few leases")
    assert shut_out.text.startswith("the key rollout-b is shut out for 42 s: 9000 requests within the last minute")
    assert "remove its public key" in shut_out.text


def test_a_run_that_does_not_learn_is_wrong_with_answers_beside_what_was_expected() -> None:
    learning = LearningWatch()
    silent = {"event": "batch", "signal_sequences/all": 0, "groups/all": 8, "reward_mean": 0.0, "reward_std": 0.0}
    for index in range(3):
        learning.take({**silent, "batch": index})
    answer = ShownAnswer(trajectory_id=4, prompt="12+3=", answer="15", expected="7001", reward=0.0, ended="length")
    seen = replace(HEALTHY, learning=learning, answers=(answer,), outcome="no: the reward was 0 in all 192 answers")
    (found,) = wrong(seen)
    assert found.startswith("no signal: every answer was wrong (reward 0); 24 of 24 groups of 3 batches had none")
    said = [remark.text for remark in diagnose(seen) if not remark.wrong]
    assert "an answer of the newest batch: 12+3= -> '15', expected 7001: reward 0, cut off" in said
    assert any(text.startswith("not measured: repeated text within an answer, entropy") for text in said)
    assert said[-1] == "no: the reward was 0 in all 192 answers"


def test_a_run_that_publishing_bounds_hears_so_and_a_little_waiting_is_not_told() -> None:
    batches = [{**row, "publish_wait_s": 0.7} for row in batches_at(0.0, 6.4, 12.8, 19.2, 25.6)]
    texts = [each.text for each in diagnose(replace(HEALTHY, batches=batches))]
    assert any("for 0.7 s of them it waits until all ranks have encoded the version before" in text for text in texts)
    seldom = [{**row, "publish_wait_s": 0.6} for row in batches]
    assert not any("Publishing bounds" in each.text for each in diagnose(replace(HEALTHY, batches=seldom)))


@pytest.mark.parametrize(
    ("every_s", "max_lag", "said"),
    [
        (6.0, 2, "a batch takes 6.0 s, and the learner works 100% of it: samples are there before it asks"),
        (6.4, 2, "the learner works 94% of it: samples are there"),
        (
            12.0,
            2,
            "works 50% of it: else it waits for samples. More or faster rollouts .* at most 2.0 times; more",
        ),
        (
            12.0,
            0,
            r"with batch\.max_lag = 0 it and the rollouts take turns. With 1 .* faster, at most 2.0 times",
        ),
    ],
)
def test_it_says_which_side_the_run_waits_for_and_what_more_would_gain(every_s: float, max_lag: int, said: str) -> None:
    settings = SETTINGS.model_copy(update={"batch": SETTINGS.batch.model_copy(update={"max_lag": max_lag})})
    times = [every_s * index for index in range(5)]
    texts = [each.text for each in diagnose(replace(HEALTHY, settings=settings, batches=batches_at(*times)))]
    assert [bool(re.search(said, text)) for text in texts].count(True) == 1
    gap = [*batches_at(*times)[:3], *batches_at(*times)[4:]]
    for others in (gap, batches_at(1.0, 1.0, 1.0, 1.0), [{**row, "train_s": "fast"} for row in batches_at(*times)]):
        assert not any("the learner works" in each.text for each in diagnose(replace(HEALTHY, batches=others)))

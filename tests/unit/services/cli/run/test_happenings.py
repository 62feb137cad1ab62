"""One line for each event that matters, once."""

from pathlib import Path
from typing import Any

from gspo_services.cli.run.happenings import Happenings
from gspo_services.cli.run.supervisor import Child, ProcessSpec
from gspo_services.runs.track import Cursor


def a_child(name: str, **changes: Any) -> Child:
    spec = ProcessSpec(name=name, module="m", arguments=(), stop_order=0, grace_s=1.0)
    return Child(spec=spec, log_path=Path("x"), **changes)


def an_eval(batch: int, reward: float | None, **fields: Any) -> dict[str, Any]:
    return {"event": "eval", "batch": batch, "policy_version": 1, "eval/reward": reward, "num_failed": 0, **fields}


def a_status(checkpointed: int = 0, newest: int = 9, **versions: int) -> dict[str, Any]:
    rollouts = [{"peer": peer, "status": "serving", "policy_version": version} for peer, version in versions.items()]
    return {"batches_checkpointed": checkpointed, "policy_version": newest, "rollouts": rollouts}


def texts(found: list[Any]) -> list[str]:
    return [("! " if each.is_problem else "") + each.text for each in found]


def test_evaluations_come_with_their_interval_and_the_best_is_named() -> None:
    news = Happenings(max_lag=2)
    rows = [
        an_eval(0, 0.5, **{"eval/reward_error": 0.1}),
        an_eval(5, 0.25, **{"eval/reward_error": None}),
        an_eval(10, 0.75, num_failed=2, **{"eval/reward_error": 0.05}),
        an_eval(15, None),
    ]
    assert texts(news.of_rows(rows)) == [
        "evaluation after 0 batches: 0.500 ± 0.196, the best so far",
        "evaluation after 5 batches: 0.250",
        "evaluation after 10 batches: 0.750 ± 0.098, the best so far; 2 tasks failed",
        "! evaluation after 15 batches: no task was finished",
    ]


def test_an_evaluation_says_when_its_tokens_are_newer_than_the_weights_it_is_named_after() -> None:
    rows = [an_eval(0, 0.5, **{"eval/versions_newer": 0.4}), an_eval(5, 0.75, **{"eval/versions_newer": 2.25})]
    first, second = texts(Happenings(max_lag=2).of_rows(rows))
    assert "newer" not in first
    assert second.endswith("the best so far (its tokens are 2.2 versions newer on average)")


def test_drops_are_summed_up_and_batches_quarantined_are_named() -> None:
    news = Happenings(max_lag=2)
    news.skip([{"event": "dropped", "reason": "stale"}])
    stale, failed = {"event": "dropped", "reason": "stale"}, {"event": "dropped", "reason": "failed"}
    quarantined = {"event": "quarantined", "batch": 4, "reason": "out of memory"}
    assert texts(news.of_rows([stale, failed, stale, quarantined, {"event": "batch", "batch": 3, "again": True}])) == [
        "! batch 4 was quarantined: out of memory; `gspo requeue` lists them",
        "batch 3 was trained again after a restart",
        "! 2 groups were dropped: stale (3 in all)",
        "! 1 group was dropped: failed (4 in all)",
    ]


def test_a_batch_that_may_leave_out_no_more_groups_is_a_problem() -> None:
    row = {"event": "filter_limit", "batch": 4, "num_groups": 256}
    (text,) = texts(Happenings(max_lag=2).of_rows([row, {"event": "filtered", "batch": 4, "group_id": 3}]))
    assert text.startswith(
        "! 256 zero-advantage groups were filtered out for batch 4, the most that data.max_filtered allows"
    )


def test_a_restart_is_told_once_with_how_the_process_ended() -> None:
    news = Happenings(max_lag=2)
    child = a_child("rollout-0")
    assert news.of_processes([child]) == []
    child.num_restarts, child.last_status = 1, -9
    assert texts(news.of_processes([child])) == ["! rollout-0 ended with status -9 and is restarted (1)"]
    assert news.of_processes([child]) == []
    child.num_restarts, child.last_status, child.said = 2, 1, "the disk is away\nsee it"
    assert texts(news.of_processes([child])) == ["! rollout-0 ended with status 1 and is restarted (2): the disk is away"]
    child.given_up = "no key"
    assert texts(news.of_processes([child])) == ["! rollout-0 is not restarted: no key"]
    assert news.of_processes([child]) == []


def test_checkpoints_are_told_when_they_come_and_not_at_the_start() -> None:
    news = Happenings(max_lag=2)
    assert news.of_status(a_status(5)) == []
    assert texts(news.of_status(a_status(10))) == ["checkpoint saved; it covers 10 batches"]
    assert news.of_status(a_status(10)) == []


def test_a_version_is_late_when_its_tokens_are_too_old_to_train_on() -> None:
    news = Happenings(max_lag=2)
    assert news.of_status(a_status(newest=9, a=7, b=9)) == []
    (text,) = texts(news.of_status(a_status(newest=10, a=7, b=10)))
    assert text == "! a still serves version 7, but the newest is 10: too old to train on"
    assert news.of_status(a_status(newest=11, a=7, b=11)) == []
    assert texts(news.of_status(a_status(newest=11, a=11))) == ["a serves a new version again"]


def test_a_tracker_that_refuses_and_then_takes_is_told_twice() -> None:
    news = Happenings(max_lag=2)
    refused = Cursor(tracker_run="r", error="no key")
    assert news.of_tracker("wandb", None) == []
    assert texts(news.of_tracker("wandb", refused)) == ["! tracker wandb refuses lines, training continues: no key"]
    assert news.of_tracker("wandb", refused) == []
    assert texts(news.of_tracker("wandb", Cursor(tracker_run="r"))) == ["tracker wandb accepts lines again"]


def test_what_keeps_a_run_from_learning_is_told_once_and_again_after_it_had_passed() -> None:
    news = Happenings(max_lag=2)
    silent = {"event": "batch", "signal_sequences/all": 0, "groups/all": 8, "reward_mean": 0.0, "reward_std": 0.0}
    first = texts(news.of_rows([{**silent, "batch": index} for index in range(3)]))
    assert first[0].startswith("! no signal: every answer was wrong (reward 0); 24 of 24 groups of 3 batches had none")
    assert first[0].endswith(", since batch 0")
    assert first[1].startswith("! Compare some answers with the expected ones")
    assert texts(news.of_rows([{**silent, "batch": 3}])) == []
    assert texts(news.of_rows([{**silent, "batch": 4, "signal_sequences/all": 64}])) == []
    assert len(news.of_rows([{**silent, "batch": index} for index in range(5, 8)])) == 2

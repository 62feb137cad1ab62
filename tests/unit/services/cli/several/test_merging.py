"""The statuses of several brokers become one."""

from typing import Any

import pytest

from gspo_services.cli.several.merging import is_over, merged_status


def a_status(**changes: Any) -> dict[str, Any]:
    status = {
        "run_id": "a", "batches_trained": 3, "batches_assembled": 3, "batches_total": 60, "batches_checkpointed": 2,
        "policy_version": 4, "train_reward": 0.5, "lag_mean": 0.25, "lag_max": 1, "eval_reward": None, "tokens_per_s": None,
        "groups": {"open": 3, "complete": 5, "dropped": 1}, "dropped": {"stale": 1}, "filtered": {"groups": 1, "limit": 4},
        "resting": 2, "prompts_started": 20, "quarantined": {"batches": 0, "groups": 0, "newest": []},
        "rollouts": [], "rollouts_gone": [], "learner": "learner", "limited": [], "waiting_for": "", "quiet_s": 1.0,
        "stopping": "", "finished": False, "error": "",
    }  # fmt: skip
    return {**status, **changes}


def merged(*answers: dict[str, Any] | None) -> dict[str, Any]:
    status = merged_status(answers)
    assert status is not None
    return status


def a_rollout(status: str = "serving", **changes: Any) -> dict[str, Any]:
    return {"peer": "rollout-0", "status": status, "policy_version": 4, "leases": 3, "silent_s": 0.5, **changes}


def test_a_run_of_which_no_broker_answers_has_no_status() -> None:
    assert merged_status([None, None]) is None


def test_a_batch_counts_as_trained_once_every_broker_has_heard_of_it() -> None:
    status = merged(a_status(batches_trained=4, batches_assembled=5, policy_version=5), a_status())
    assert (status["batches_trained"], status["batches_assembled"], status["policy_version"]) == (3, 3, 4)


def test_counts_are_added_and_means_are_of_equal_shares() -> None:
    status = merged(a_status(), a_status(train_reward=1.0, lag_mean=0.75, lag_max=3, dropped={"stale": 1, "failed": 2}))
    assert status["groups"] == {"open": 6, "complete": 10, "dropped": 2}
    assert status["dropped"] == {"stale": 2, "failed": 2}
    assert status["filtered"] == {"groups": 2, "limit": 8}
    assert (status["train_reward"], status["lag_mean"], status["lag_max"]) == (0.75, 0.5, 3)
    assert status["prompts_started"] == 20
    assert merged(a_status(train_reward=None), a_status())["train_reward"] == 0.5


def test_a_rollout_is_one_row_with_all_its_leases_and_its_worst_state() -> None:
    status = merged(
        a_status(rollouts=[a_rollout()], rollouts_gone=["rollout-1", "rollout-2"]),
        a_status(
            rollouts=[a_rollout("quarantined", leases=2, policy_version=3), a_rollout(peer="rollout-1")],
            rollouts_gone=["rollout-2"],
        ),
    )
    assert status["rollouts"] == [
        a_rollout("quarantined", leases=5, policy_version=3),
        a_rollout(peer="rollout-1"),
    ]
    assert status["rollouts_gone"] == ["rollout-2"]


def test_the_wait_is_that_of_the_broker_that_the_others_wait_for() -> None:
    ready = a_status(waiting_for="the learner to ask for the next batch")
    status = merged(ready, a_status(waiting_for="2 more complete groups"), a_status(batches_assembled=4, waiting_for="x"))
    assert status["waiting_for"] == "broker 1: 2 more complete groups"
    both = merged(a_status(waiting_for="1 more"), a_status(waiting_for="2 more"))
    assert both["waiting_for"] == "broker 0: 1 more (broker 1 waits too)"


def test_a_broker_that_does_not_answer_is_named_and_ends_nothing() -> None:
    status = merged(a_status(finished=True), None)
    assert status["waiting_for"] == "broker 1 to answer"
    assert not status["finished"]
    assert [each["answers"] for each in status["brokers"]] == [True, False]


def test_a_batch_that_is_quarantined_is_one_batch_with_the_groups_of_all() -> None:
    one = {"batches": 1, "groups": 2, "newest": [{"batch": 7, "groups": 2, "policy_version": 3, "reason": "NaN"}]}
    late = {"batches": 0, "groups": 0, "newest": []}
    status = merged(a_status(quarantined=one), a_status(quarantined=one), a_status(quarantined=late))
    assert status["quarantined"] == {
        "batches": 1,
        "groups": 4,
        "newest": [{"batch": 7, "groups": 4, "policy_version": 3, "reason": "NaN"}],
    }


def test_an_error_says_whose_it_is() -> None:
    assert merged(a_status(), a_status(error="20 groups failed"))["error"] == "broker 1: 20 groups failed"


ENDED = {"finished": True, "batches_trained": 5, "batches_assembled": 5}
AHEAD = {"stopping": "enough", "batches_trained": 5, "batches_assembled": 6}


@pytest.mark.parametrize(
    ("changes", "over"),
    [
        ([ENDED, ENDED], True),
        ([ENDED, AHEAD], True),
        ([ENDED, {**AHEAD, "stopping": ""}], False),  # It has not heard of the stop.
        ([ENDED, {**AHEAD, "batches_trained": 4}], False),  # It has not heard of the last batch.
        ([AHEAD, AHEAD], False),  # Both have the batch: the learner trains it.
        ([{}, {}], False),
    ],
)
def test_a_run_is_over_when_no_broker_can_get_further(changes: list[dict[str, Any]], over: bool) -> None:
    assert is_over([a_status(**each) for each in changes]) == over

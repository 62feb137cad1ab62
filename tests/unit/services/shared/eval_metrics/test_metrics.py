"""Metrics by name."""

import pytest

from gspo_services.shared.eval_metrics import TaskSamples, default_metrics, estimate, metric_named, require_samples


def task(*solved: bool, answers: str | None = None, rating: float | None = None) -> TaskSamples:
    votes = [None] * len(solved) if answers is None else list(answers)
    return TaskSamples(rewards=[float(each) for each in solved], solved=solved, answers=votes, rating=rating)


def test_each_metric_is_the_mean_of_the_tasks_values() -> None:
    tasks = [task(True, False, False, False, answers="abbc"), task(True, True, True, True, answers="xxyy")]
    found = {
        name: estimate(name, tasks).value for name in ("reward", "avg@4", "avg@1", "pass@1", "pass@2", "pass@4", "maj@4")
    }
    assert found == {
        "reward": 0.625, "avg@4": 0.625, "avg@1": 0.625, "pass@1": pytest.approx(0.625), "pass@2": pytest.approx(0.75),
        "pass@4": 1.0, "maj@4": 0.5,
    }  # fmt: skip


def test_a_task_with_fewer_samples_is_left_out_and_counted() -> None:
    found = estimate("pass@2", [task(True, True), task(False)])
    assert (found.value, found.num_tasks) == (1.0, 1)
    assert estimate("pass@2", [task(False)]).remark == "no_samples"


def test_rewards_outside_of_0_and_1_have_students_interval() -> None:
    tasks = [TaskSamples(rewards=[reward], solved=[False], answers=[None]) for reward in (-1.0, 3.0, 4.0)]
    found = estimate("reward", tasks)
    assert found.value == 2.0
    assert found.low is not None
    assert found.low < -1.0


def test_elo_counts_the_tasks_with_a_rating() -> None:
    tasks = [task(True, rating=1500.0), task(False, rating=1500.0), task(False)]
    found = estimate("elo", tasks)
    assert (found.value, found.num_tasks) == (pytest.approx(1500.0, abs=1e-6), 2)
    assert estimate("elo", tasks[:1]).remark == "all_solved"
    assert estimate("elo", tasks[2:]).remark == "no_samples"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pass@0", "k is 0: expected at least 1"),
        ("maj@-3", "at least 1"),
        ("f1", "there are reward, avg@k"),
        ("pass@", "no metric"),
    ],
)
def test_what_is_no_metric_is_refused_with_those_that_there_are(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        metric_named(name)


def test_a_k_above_the_samples_is_refused_with_both_ways_out() -> None:
    with pytest.raises(
        ValueError, match="pass@8 needs 8 samples of each task, and there will be 4: set samples to 8 or more"
    ):
        require_samples(["avg@4", "pass@8"], 4)
    with pytest.raises(ValueError, match="named twice"):
        require_samples(["avg@4", "avg@4"], 4)


def test_the_metrics_that_come_by_themselves_fit_the_set() -> None:
    assert default_metrics(1, has_answers=True, has_ratings=False) == ("reward", "avg@1")
    assert default_metrics(8, has_answers=True, has_ratings=True) == ("reward", "avg@8", "pass@8", "maj@8", "elo")

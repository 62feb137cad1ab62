"""Runs that cannot learn are named by the reason, and runs that learn by none.

From recorded lines of real runs, or of the real learner with answers sampled by torch (mismatch, same_tasks, one_component,
eps_1e-9), trimmed to what the watch reads. ``tests/demo/test_no_learning.py`` makes such runs again.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from gspo_services.shared.learning import LearningFinding, LearningWatch, counted_components
from tests.support.runs.learning_lines import RECORDED, a_batch, an_evaluation, recorded

LEARNING = sorted(path.stem for path in RECORDED.glob("learns_*.jsonl"))
PARTS = {"reward_weights": {"right": 1.0, "digits": 0.2, "too_long": -1.0}}


def seen(rows: list[dict[str, Any]], options: dict[str, Any] | None = None) -> Iterator[tuple[int, list[LearningFinding]]]:
    """The newest batch, and what was found by then."""
    watch = LearningWatch(counted_components(options or {}, None))
    batch = -1
    for row in rows:
        watch.take(row)
        batch = row["batch"] if row["event"] == "batch" else batch
        yield batch, watch.findings


def first_seen(rows: list[dict[str, Any]], name: str, options: dict[str, Any] | None = None) -> tuple[int, LearningFinding]:
    return next((batch, each) for batch, found in seen(rows, options) for each in found if each.name == name)


@pytest.mark.parametrize(
    ("run", "name", "since", "text"),
    [
        ("gold", "no_signal", 0, "every answer was wrong (reward 0); 24 of 24 groups of 3 batches had none"),
        ("cut_off", "cut_off", 0, "at least 100% of the answers were cut off by a limit, at 1.0 tokens"),
        ("lr_tiny", "no_effect", 0, "the weights do not move: no answer's probability changed by more than 7e-07"),
        ("lr_huge", "no_signal", 3, "every answer was wrong (reward 0), and some were right before"),
        ("lr_huge", "entropy", 1, "the entropy collapsed: from 0.725 to"),
        ("one_component", "one_component", 0, "the reward is digits alone: right was 0 in every batch"),
        ("mismatch", "mismatch", 0, "engine and learner differ by 2.3 nats a token"),
        ("same_tasks", "same_tasks", 2, "every batch has all 6 tasks again: they were drawn 4 times each"),
    ],
)
def test_a_run_that_cannot_learn_is_named_within_five_batches(run: str, name: str, since: int, text: str) -> None:
    batch, found = first_seen(recorded(run), name, PARTS)
    assert batch - since < 5
    assert found.since == since
    assert text in found.text
    assert found.is_wrong == (name != "same_tasks"), "six tasks were enough for the demo"
    assert found.advice


@pytest.mark.parametrize("run", LEARNING)
def test_nothing_is_said_of_a_run_that_learns(run: str) -> None:
    assert {each.name for _, found in seen(recorded(run)) for each in found} == set()


SILENT = {"signal_sequences/all": 0, "reward_std": 0.0, "grad_norm_max": 0.0}


@pytest.mark.parametrize(
    ("first", "later", "others", "is_told"),
    [
        (1e-6, 0.011, {}, True),  # A float32 pair.
        (1e-6, 0.009, {}, False),
        (0.02, 0.11, {}, True),  # A bfloat16 pair that became five times as noisy.
        (0.03, 0.11, {}, False),
        (0.08, 0.21, {}, True),
        (0.064, 0.064, {"mismatch_far": 1e-3}, True),  # Float32 from the start, and never alike.
        (0.064, 0.064, {"mismatch_far": 0.25}, False),
    ],
)
def test_a_mismatch_begins_at_the_noise_of_the_pair(
    first: float, later: float, others: dict[str, float], is_told: bool
) -> None:
    rows = [a_batch(index, mismatch_sigma=later if index >= 3 else first, **others) for index in range(8)]
    *_, (_, findings) = seen(rows)
    assert ("mismatch" in {each.name for each in findings}) is is_told


@pytest.mark.parametrize(
    ("name", "changed", "text"),
    [
        ("no_signal", {**SILENT, "reward_mean": 0.37}, "every answer had the reward 0.37"),
        ("no_signal", {**SILENT, "reward_std": 0.5}, "within each group all rewards were alike"),
        ("no_effect", {"grad_norm_max": 0.0}, "the gradient was 0 although answers had advantages"),
        ("no_effect", {"learning_rate": 0.0}, "the learning rate was 0"),
        ("clipped", {"clip_fraction/all": 0.72}, "96% of the answers with an advantage were clipped"),
        ("mismatch", {"mismatch_sigma": 0.4}, "engine and learner differ by 0.4 nats a token"),
        ("same_tasks", {"num_tasks": 6, "data_passes": 4.0}, "every batch has all 6 tasks again"),
        ("same_tasks", {"num_tasks": 600, "data_passes": 31.0}, "each of the 600 tasks was drawn 31 times"),
        ("same_tasks", {"num_tasks": 600, "num_resting_tasks": 590}, "590 of 600 tasks rest"),
    ],
)
def test_each_reason_is_told_from_the_measures_it_rests_on(name: str, changed: dict[str, Any], text: str) -> None:
    rows = [a_batch(index, **(changed if index >= 10 else {})) for index in range(16)]
    batch, found = first_seen(rows, name)
    assert 10 <= found.since <= batch <= 14
    assert text in found.text


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("entropy", {"entropy/all": 0.03}),
        ("entropy", {"entropy/all": 2.5}),
        ("length", {"length/mean": 2.0}),
        ("length", {"length/mean": 60.0}),
    ],
)
def test_a_policy_that_changes_much_has_collapsed_only_where_its_reward_is_no_better(
    name: str, changed: dict[str, Any]
) -> None:
    def changing(reward: float, **more: float) -> set[str]:
        later = {**changed, **more, "reward_mean": reward}
        rows = [a_batch(index, **(later if index >= 10 else {})) for index in range(16)]
        return {each.name for _, found in seen(rows) for each in found}

    assert changing(0.2) == {name}
    assert changing(0.9) == set()
    assert changing(0.2, **{"level/sums": 3}) == set(), "harder tasks have lower rewards"


def test_one_component_alone_is_named_where_the_weights_are_known_and_what_is_always_earned_is_no_fault() -> None:
    def parts(index: int, **changed: float) -> dict[str, Any]:
        varying = {"train/reward/right": 0.0, "train/reward/digits": 0.1 + index / 100, "train/reward/too_long": 0.0}
        return a_batch(index, **{**varying, **changed})

    rows = [parts(index) for index in range(6)]
    batch, found = first_seen(rows, "one_component", PARTS)
    assert batch == 4
    assert "the reward is digits alone: right was 0 in every batch" in found.text
    assert "too_long" not in found.text, "a penalty that nobody paid"
    for earned in (
        [parts(index, **{"train/reward/right": 1.0}) for index in range(6)],
        [*rows[:4], parts(4, **{"train/reward/right": 0.02})],
    ):
        assert all(not found for _, found in seen(earned, PARTS))
    assert all(not found for _, found in seen(rows)), "of unknown weights nothing is said"


def test_a_held_out_reward_that_falls_twice_while_training_rises_is_named() -> None:
    def run(last: float, training: float) -> list[dict[str, Any]]:
        rows = [a_batch(index, reward_mean=0.3 if index < 10 else training) for index in range(20)]
        held_out = [an_evaluation(0, 0.5), an_evaluation(10, 0.6), an_evaluation(15, 0.4), an_evaluation(20, last)]
        return [*rows[:10], *held_out[:2], *rows[10:15], held_out[2], *rows[15:], held_out[3]]

    batch, found = first_seen(run(0.38, 0.7), "held_out_falls")
    assert batch == 19
    assert "fell from 0.6 (after 10 batches) to 0.38 while the training reward rose from 0.3 to 0.7" in found.text
    for healthy in (run(0.55, 0.7), run(0.38, 0.2)):
        assert all(not found for _, found in seen(healthy))


def test_solved_tasks_are_a_note_after_there_was_something_to_learn_and_a_fault_from_the_start_on() -> None:
    solved = {**SILENT, "reward_mean": 1.0}
    _, found = first_seen([a_batch(0), *(a_batch(index, **solved) for index in range(1, 5))], "no_signal")
    assert not found.is_wrong
    assert "every answer was right" in found.text
    assert first_seen([a_batch(index, **solved) for index in range(4)], "no_signal")[1].is_wrong


def test_a_synchronous_run_of_one_step_has_ratios_of_1_and_is_healthy() -> None:
    still = {"ratio_min/all": 1.0, "ratio_max/all": 1.0, "lag/all": 0.0, "optimizer_steps": 1}
    assert all(not found for _, found in seen([a_batch(index, **still) for index in range(6)]))
    assert first_seen([a_batch(index, **{**still, "optimizer_steps": 2}) for index in range(6)], "no_effect")


def test_a_finding_passes_with_its_cause_and_a_batch_trained_again_counts_once() -> None:
    watch = LearningWatch()
    for row in (a_batch(0, **SILENT), a_batch(1, **SILENT), a_batch(1, **SILENT, again=True)):
        watch.take(row)
    assert watch.findings == []
    watch.take(a_batch(2, **SILENT))
    assert [each.name for each in watch.findings] == ["no_signal"]
    watch.take(a_batch(3))
    assert watch.findings == []


def test_what_the_lines_do_not_have_is_not_measured() -> None:
    watch = LearningWatch()
    watch.take({"event": "batch", "batch": 0, "train/reward/a": 0.5, "train/reward/b": 0.5})
    assert watch.not_measured == [
        "repeated text within an answer",
        "entropy",
        "answers cut off",
        "mismatch of engine and learner",
        "single components of the reward, because their weights are not known here",
    ]

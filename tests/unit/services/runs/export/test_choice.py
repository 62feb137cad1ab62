"""Which checkpoint is exported."""

import math
from pathlib import Path

import pytest

from gspo_services.runs.audit import Checkpoint
from gspo_services.runs.export.choice import choose, wanted_checkpoint
from gspo_services.runs.metrics import HeldOut
from gspo_services.shared.runtime.errors import ConfigurationError

RUN = Path("runs/a")


def checkpoint(version: int, batch: int) -> Checkpoint:
    return Checkpoint(name=f"version-{version:010d}-batch-{batch:010d}", policy_version=version, batch_position=batch)


def evaluated(version: int, batch: int, reward: float) -> HeldOut:
    return HeldOut(
        policy_version=version, batch=batch, reward=reward, num_finished=8, num_failed=0, time_s=math.nan, score=reward
    )


CHECKPOINTS = [checkpoint(11, 10), checkpoint(21, 20), checkpoint(31, 30)]


def test_the_best_is_the_one_with_the_highest_held_out_reward() -> None:
    evaluations = [evaluated(11, 10, 0.5), evaluated(21, 20, 0.75), evaluated(31, 30, 0.25)]
    choice = choose(RUN, CHECKPOINTS, evaluations, "best")
    assert choice.checkpoint == CHECKPOINTS[1]
    assert choice.evaluation is evaluations[1]
    assert choice.remark == ""


def test_of_equally_good_ones_the_earliest_is_taken() -> None:
    choice = choose(RUN, CHECKPOINTS, [evaluated(31, 30, 0.5), evaluated(21, 20, 0.5), evaluated(11, 10, 0.25)], "best")
    assert choice.checkpoint == CHECKPOINTS[1]


def test_a_better_evaluation_without_a_checkpoint_is_told() -> None:
    choice = choose(RUN, CHECKPOINTS, [evaluated(11, 10, 0.5), evaluated(16, 15, 0.875)], "best")
    assert choice.checkpoint == CHECKPOINTS[0]
    assert "0.875, after 15 batches" in choice.remark


def test_an_evaluation_belongs_to_its_version_and_not_to_another_of_the_same_batch() -> None:
    again = [*CHECKPOINTS, checkpoint(0, 35)]
    choice = choose(RUN, again, [evaluated(9, 10, 0.9), evaluated(0, 35, 0.8), evaluated(31, 30, 0.1)], "best")
    assert choice.checkpoint == CHECKPOINTS[2]


def test_without_an_evaluated_checkpoint_the_error_names_both_sides() -> None:
    with pytest.raises(ConfigurationError, match=r"after these batches: 10, 20, 30; evaluated .* these: 5"):
        choose(RUN, CHECKPOINTS, [evaluated(6, 5, 0.9)], "best")


def test_the_newest_is_the_default_and_a_number_names_one() -> None:
    assert choose(RUN, CHECKPOINTS, [], None).checkpoint == CHECKPOINTS[2]
    first = evaluated(11, 10, 0.5)
    assert choose(RUN, CHECKPOINTS, [first], 10).evaluation is first
    with pytest.raises(
        ConfigurationError, match=r"--checkpoint is 15: runs/a has checkpoints after these batches: 10, 20, 30"
    ):
        choose(RUN, CHECKPOINTS, [], 15)


def test_of_two_checkpoints_after_as_many_batches_the_newer_weights_are_taken() -> None:
    assert choose(RUN, [checkpoint(25, 20), *CHECKPOINTS[:2]], [], 20).checkpoint == checkpoint(25, 20)


def test_a_run_without_checkpoints_says_when_there_will_be_one() -> None:
    with pytest.raises(ConfigurationError, match=r"no checkpoint yet: .*learner.checkpoint_every_batches"):
        choose(RUN, [], [], None)


@pytest.mark.parametrize("text", ["", "-1", "newest", "4.5", "٣", "9" * 40])
def test_a_checkpoint_is_a_number_or_best(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--checkpoint is .*: give a number of batches, such as 40, or 'best'"):
        wanted_checkpoint(text)
    assert wanted_checkpoint("best") == "best"
    assert wanted_checkpoint("40") == 40

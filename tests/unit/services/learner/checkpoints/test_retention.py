"""The newest checkpoints stay, and the best one."""

from collections.abc import Mapping
from pathlib import Path

from gspo_services.learner.checkpoints.format import CheckpointState, checkpoint_of
from gspo_services.learner.checkpoints.retention import worth_keeping
from gspo_services.learner.checkpoints.saver import CheckpointSaver
from tests.support.engines.bigram_engine import BigramEngine


def paths(*versions: int) -> list[Path]:
    return [Path(checkpoint_of(version, batch)) for batch, version in enumerate(versions, start=1)]


def save_in_turn(root: Path, versions: int, scores: Mapping[int, float | None], keep: int = 2) -> list[int]:
    """Save one checkpoint after the other. Returns the versions whose checkpoints are there at the end."""
    saver = CheckpointSaver(BigramEngine(), root, keep=keep, background=None, scores=lambda: scores)
    for version in range(1, versions + 1):
        saver.begin(CheckpointState(policy_version=version, batch_position=version, mismatch={}))
        assert saver.advance() is not None
    return sorted(int(path.name.split("-")[1]) for path in root.glob("version-*"))


def test_the_best_checkpoint_stays_beside_the_newest(tmp_path: Path) -> None:
    assert save_in_turn(tmp_path, 6, {1: 0.2, 2: 0.9, 3: 0.4, 6: 0.5}) == [2, 5, 6]


def test_a_better_one_takes_its_place(tmp_path: Path) -> None:
    assert save_in_turn(tmp_path, 7, {2: 0.4, 4: 0.9}) == [4, 6, 7]


def test_without_scores_only_the_newest_stay(tmp_path: Path) -> None:
    assert save_in_turn(tmp_path, 5, {}) == [4, 5]


def test_of_equally_good_checkpoints_the_earliest_is_kept() -> None:
    first, second, third = paths(1, 2, 3)
    assert worth_keeping([first, second, third], {1: 0.25, 2: 0.5, 3: 0.5}) == {second}


def test_a_checkpoint_that_is_being_evaluated_stays_until_its_score_is_known() -> None:
    first, second, third = paths(1, 2, 3)
    assert worth_keeping([first, second, third], {1: 0.5, 2: None}) == {first, second}
    assert worth_keeping([first, second, third], {1: 0.5, 2: 0.25}) == {first}


def test_weights_without_a_version_are_nobodys_score() -> None:
    again, other = paths(0, 4)
    assert worth_keeping([again, other], {0: 1.0, 4: 0.5}) == {other}
    assert worth_keeping([again], {0: None}) == set()


def test_a_score_of_a_version_without_a_checkpoint_keeps_nothing_else() -> None:
    assert worth_keeping(paths(1, 2), {7: 0.9}) == set()

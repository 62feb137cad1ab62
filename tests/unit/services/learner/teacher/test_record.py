"""What a killed rank left in its file."""

from pathlib import Path

import pytest

from gspo_services.learner.teacher import ScoreRecord
from tests.support.teacher.killed_scores import KEPT, LOST, SCORES, killed_while_it_added


@pytest.mark.parametrize("replayed", [False, True])
def test_a_file_whose_rank_was_killed_while_it_added_has_what_it_had_before(replayed: bool, tmp_path: Path) -> None:
    """Found by another rank after a resume on fewer, and by a replay."""
    run = tmp_path / "run #1?"
    killed_while_it_added(run)
    assert (run / "rank-3.sqlite-journal").stat().st_size > 512
    record = ScoreRecord(tmp_path / "replay", 0, run) if replayed else ScoreRecord(run, 0)
    assert {key: found.tolist() for key, found in record.find([KEPT, LOST]).items()} == {KEPT: SCORES.tolist()}


def test_a_file_whose_rank_was_killed_before_it_had_a_table_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "rank-3.sqlite").touch()
    assert ScoreRecord(tmp_path, 0).find([KEPT]) == {}

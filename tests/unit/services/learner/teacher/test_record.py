"""What a killed rank left in its file."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from gspo_services.learner.teacher import ScoreRecord

KEPT, LOST, UNKNOWN = (bytes([number]) * 16 for number in range(3))
SCORES = np.array([-1.0, -0.25], dtype=np.float32)


def killed_while_it_added(directory: Path) -> None:
    """Rank 3, with the journal that rolls its file back."""
    whole = directory.with_name("whole")
    ScoreRecord(whole, 3).add({KEPT: SCORES})
    directory.mkdir()
    with closing(sqlite3.connect(whole / "rank-3.sqlite")) as writing:
        writing.execute("PRAGMA cache_size = 1")
        writing.executemany("INSERT INTO scores VALUES (?, ?)", [(LOST, bytes(8)), (UNKNOWN, bytes(1 << 20))])
        for path in whole.iterdir():
            shutil.copyfile(path, directory / path.name)


@pytest.mark.parametrize("replayed", [False, True])
def test_a_file_whose_rank_was_killed_while_it_added_has_what_it_had_before(replayed: bool, tmp_path: Path) -> None:
    """Found by another rank after a resume on fewer, and by a replay."""
    run = tmp_path / "run"
    killed_while_it_added(run)
    assert (run / "rank-3.sqlite-journal").stat().st_size > 512
    record = ScoreRecord(tmp_path / "replay", 0, run) if replayed else ScoreRecord(run, 0)
    assert {key: found.tolist() for key, found in record.find([KEPT, LOST]).items()} == {KEPT: SCORES.tolist()}


def test_a_file_whose_rank_was_killed_before_it_had_a_table_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "rank-3.sqlite").touch()
    assert ScoreRecord(tmp_path, 0).find([KEPT]) == {}

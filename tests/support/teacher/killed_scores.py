"""The file of what a teacher said, as a rank leaves it that is killed while it adds to it."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np

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

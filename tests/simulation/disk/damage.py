"""What happens to a broker's files while it is down, and how they were before."""

import shutil
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Final

from gspo_services.broker.store.mark import MARK_FILE
from gspo_services.broker.store.reader import LEDGER_FILE, reading
from tests.simulation.audit.restoring import AcceptedLoss
from tests.simulation.weather import ACCEPTED_LOSS

FLIP: Final = """
UPDATE trajectories SET version_sum = version_sum + 1 WHERE trajectory_id = (
    SELECT max(trajectory_id) FROM trajectories
    WHERE group_id IN (SELECT group_id FROM groups WHERE status IN ('open', 'complete'))
)
"""
FILES: Final = (LEDGER_FILE, f"{LEDGER_FILE}-wal", MARK_FILE)


class Damage:
    """One kind of damage. What it needs of the past is copied when it is made."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.kind = kind
        self.flipped = False
        """A row that a start needs is another one."""
        self.accepted: AcceptedLoss | None = None
        """How a person goes on from it, instead of putting the whole files back."""
        self._directory = directory
        self._former, self._whole = (Path(tempfile.mkdtemp(prefix="weather-", dir=directory)) for _ in range(2))
        with reading(directory) as connection, closing(sqlite3.connect(self._former / LEDGER_FILE)) as copy:
            connection.backup(copy)
        shutil.copyfile(directory / MARK_FILE, self._former / MARK_FILE)

    def strike(self) -> None:
        """The broker is down."""
        _replace(self._directory, self._whole)
        if self.kind in ("old copy", ACCEPTED_LOSS):
            (self._directory / FILES[1]).unlink(missing_ok=True)
            shutil.copyfile(self._former / LEDGER_FILE, self._directory / LEDGER_FILE)
        elif self.kind == "old mark":
            shutil.copyfile(self._former / MARK_FILE, self._directory / MARK_FILE)
        else:
            with closing(sqlite3.connect(self._directory / LEDGER_FILE)) as connection:
                self.flipped = bool(connection.execute(FLIP).rowcount)
                connection.commit()

    def undo(self) -> None:
        """A person puts the whole files back."""
        _replace(self._whole, self._directory)
        self.forget()

    def forget(self) -> None:
        """Nothing of it is needed any more."""
        for aside in (self._former, self._whole):
            shutil.rmtree(aside, ignore_errors=True)


def _replace(source: Path, destination: Path) -> None:
    for name in FILES:
        (destination / name).unlink(missing_ok=True)
        if (source / name).is_file():
            shutil.copyfile(source / name, destination / name)

"""Keeps what a server scored, by the content of the tokens: trained again, a batch gets the same numbers."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gspo_services.learner.teacher.client import TeacherError

NAME: Final = "rank-{}.sqlite"
BUSY_S: Final = 60.0
_TABLE: Final = "CREATE TABLE IF NOT EXISTS scores (tokens BLOB PRIMARY KEY, logprobs BLOB NOT NULL) WITHOUT ROWID"


def key_of(teacher: str, token_ids: NDArray[np.int64]) -> bytes:
    """The digest under which the log-probs of a sequence by a server of this name are kept."""
    return blake2b(f"{teacher}\0".encode() + token_ids.astype("<i8").tobytes(), digest_size=16).digest()


class ScoreRecord:
    """One rank's file in the run's directory, and those of the other ranks, which may have had its sequences before."""

    def __init__(self, directory: Path, rank: int, earlier: Path | None = None) -> None:
        """``earlier``: another run's directory, which is not added to. Raises: TeacherError when it cannot be opened."""
        self._directories = (directory,) if earlier is None else (directory, earlier)
        self._name = NAME.format(rank)
        self._path = directory / self._name
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with self._opened() as own:
                own.execute(_TABLE)
        except (OSError, sqlite3.Error) as error:
            raise TeacherError(f"{self._path}: {error}") from error

    def find(self, keys: Iterable[bytes]) -> dict[bytes, NDArray[np.float32]]:
        """The recorded scores of these sequences; this rank's record takes precedence. Raises: TeacherError."""
        missing, found = set(keys), {}
        for path in self._files():
            if not missing:
                break
            try:
                # Not mode=ro, which cannot roll back what a killed rank left half written.
                with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=rw", uri=True, timeout=BUSY_S)) as connection:
                    if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'scores'").fetchone():
                        continue  # Its rank was killed before it had made the table.
                    for key in sorted(missing):
                        row = connection.execute("SELECT logprobs FROM scores WHERE tokens = ?", (key,)).fetchone()
                        if row is not None:
                            found[key] = np.frombuffer(row[0], dtype="<f4").astype(np.float32)
            except sqlite3.Error as error:
                raise TeacherError(f"{path}: what the teacher said cannot be read: {error}") from error
            missing -= found.keys()
        return found

    def add(self, scores: Mapping[bytes, NDArray[np.float32]]) -> None:
        """Return when they are on disk. Raises: TeacherError."""
        rows = [(key, logprobs.astype("<f4").tobytes()) for key, logprobs in scores.items()]
        try:
            with self._opened() as own:
                own.executemany("INSERT OR REPLACE INTO scores VALUES (?, ?)", rows)
        except sqlite3.Error as error:
            raise TeacherError(f"{self._path}: what the teacher said cannot be kept: {error}") from error

    def _files(self) -> Iterator[Path]:
        """The rank's own first: two ranks that had the same tokens may have heard different numbers."""
        for directory in self._directories:
            yield from sorted(directory.glob(NAME.format("*")), key=lambda path: (path.name != self._name, path.name))

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """This rank's file; what is changed inside is durable afterwards."""
        connection = sqlite3.connect(self._path, timeout=BUSY_S)
        try:
            connection.execute("PRAGMA synchronous = FULL")
            yield connection
            connection.commit()
        finally:
            connection.close()

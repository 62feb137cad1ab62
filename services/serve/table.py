"""The durable table of what clients asked for: a call is committed before it is accepted, and its answer before it is given.

    calls      each accepted call of a model, by (model, seq_id), its body, and its answer once it was executed
    saved      what a client's path names: a directory that never changes
    samplers   sampling sessions, which a client makes once and uses after a restart of the service, too

A call that has no answer is executed, by whichever process comes next, after those with lower numbers. One that has an
answer is executed again only to get back to where the model was, and its answer is then compared.
"""

from __future__ import annotations

import hashlib
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gspo_services.serve.calls import Kind

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS calls (
    model TEXT NOT NULL, seq INTEGER NOT NULL, kind TEXT NOT NULL, body BLOB NOT NULL, digest BLOB NOT NULL,
    answer BLOB, PRIMARY KEY (model, seq)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS saved (
    path TEXT PRIMARY KEY, directory TEXT NOT NULL, model TEXT NOT NULL, rank INTEGER NOT NULL, sampler INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS samplers (id TEXT PRIMARY KEY, path TEXT NOT NULL) WITHOUT ROWID;
"""
_DIGEST_BYTES: Final = 16


class OtherCallError(ValueError):
    """A call with a number that another call already has."""


@dataclass(frozen=True, kw_only=True)
class AcceptedCall:
    """A call as it is executed."""

    model: str
    seq: int
    kind: Kind
    body: bytes
    answer: bytes | None
    """None: it was not executed yet."""

    @property
    def request_id(self) -> str:
        return request_id_of(self.model, self.seq)


@dataclass(frozen=True, kw_only=True)
class SavedWeights:
    """What a path names. ``directory``: relative to that of the service."""

    path: str
    directory: str
    model: str
    rank: int
    sampler: bool
    """Whether it was saved to sample from, and not to train on."""


def request_id_of(model: str, seq: int) -> str:
    """The id of the future of a call: the same when the call is sent again."""
    return f"{model}:{seq}"


class CallTable:
    """The table in SQLite. Its methods may be called from any thread; each commits before it returns."""

    def __init__(self, path: Path) -> None:
        """Open it, and make it where there is none. Raises: sqlite3.Error, OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        # Acknowledged calls survive the loss of power, as in the broker's ledger.
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.executescript(_SCHEMA)

    def close(self) -> None:
        """Close it; nothing may be called afterwards."""
        with self._lock:
            self._connection.close()

    def accept(self, model: str, seq: int, kind: Kind, body: bytes) -> bool:
        """Take a call. Returns False when it was taken before: then nothing changes. Raises: OtherCallError."""
        digest = hashlib.blake2b(kind.encode() + b"\0" + body, digest_size=_DIGEST_BYTES).digest()
        with self._writing() as connection:
            row = connection.execute("SELECT kind, digest FROM calls WHERE model = ? AND seq = ?", (model, seq)).fetchone()
            if row is None:
                connection.execute("INSERT INTO calls VALUES (?, ?, ?, ?, ?, NULL)", (model, seq, kind, body, digest))
                return True
        # A refused call keeps the reason instead of its body.
        if row[0] != "refused" and row[1] != digest:
            raise OtherCallError(
                f"call {seq} of {model} was a {row[0]} with another content: a number names one call; make another model "
                "to begin anew"
            )
        return False

    def answer(self, model: str, seq: int, answer: bytes) -> None:
        """Keep the answer to a call, once and for all."""
        with self._writing() as connection:
            connection.execute(
                "UPDATE calls SET answer = ? WHERE model = ? AND seq = ? AND answer IS NULL", (answer, model, seq)
            )

    def call(self, model: str, seq: int) -> AcceptedCall | None:
        """Return a call with its body; None: it was never accepted."""
        columns = "model, seq, kind, body, answer"
        with self._lock:
            row = self._connection.execute(
                f"SELECT {columns} FROM calls WHERE model = ? AND seq = ?", (model, seq)
            ).fetchone()
        return None if row is None else AcceptedCall(model=row[0], seq=row[1], kind=row[2], body=row[3], answer=row[4])

    def answer_of(self, model: str, seq: int) -> tuple[bool, bytes | None]:
        """Return whether a call was accepted, and its answer, if it has one."""
        with self._lock:
            row = self._connection.execute("SELECT answer FROM calls WHERE model = ? AND seq = ?", (model, seq)).fetchone()
        return (False, None) if row is None else (True, row[0])

    def numbers(self) -> Iterator[tuple[str, int]]:
        """Yield model and seq_id of all calls, in the order of execution within a model."""
        with self._lock:
            rows = self._connection.execute("SELECT model, seq FROM calls ORDER BY model, seq").fetchall()
        yield from rows

    def name_saved(self, saved: SavedWeights) -> None:
        """Let a path name these weights from now on."""
        with self._writing() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO saved VALUES (?, ?, ?, ?, ?)",
                (saved.path, saved.directory, saved.model, saved.rank, int(saved.sampler)),
            )

    def saved(self, path: str) -> SavedWeights | None:
        """Return what a path names; None: nothing."""
        with self._lock:
            row = self._connection.execute("SELECT * FROM saved WHERE path = ?", (path,)).fetchone()
        if row is None:
            return None
        return SavedWeights(path=row[0], directory=row[1], model=row[2], rank=row[3], sampler=bool(row[4]))

    def open_sampler(self, sampler_id: str, path: str) -> None:
        """Keep a sampling session of these weights; an empty ``path`` is the base model. The first one stays."""
        with self._writing() as connection:
            connection.execute("INSERT OR IGNORE INTO samplers VALUES (?, ?)", (sampler_id, path))

    def sampler(self, sampler_id: str) -> str | None:
        """Return the path of a sampling session; None: there is no such session."""
        with self._lock:
            row = self._connection.execute("SELECT path FROM samplers WHERE id = ?", (sampler_id,)).fetchone()
        return None if row is None else str(row[0])

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")

"""Reads everything that a ledger holds, a few rows at a time, and finds what a disk has changed."""

import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gspo_services.broker.rows import ArchiveRow
from gspo_services.broker.store.archive_file import ARCHIVE_DIRECTORY, file_digest, held
from gspo_services.broker.store.payload import CHUNK_COLUMNS, chunk_checksum
from gspo_services.broker.store.reader import Reader, StoreCorrupt
from gspo_services.broker.store.schema import checked_columns, row_checksum

ROWS: Final = 256
"""Rows that one step reads: its transaction is so short that it keeps no log from being merged."""
BUSY_S: Final = 5.0
CHUNKS: Final = "chunks"
_KEYS: Final = {"meta": ("key",), "trained": ("batch", "policy_version"), "journal": ("trajectory_id", "place")}
_FIRST: Final = {"meta": ("",), "trained": (-1, -1), "journal": (-1, -1)}


@dataclass(kw_only=True)
class Scrubbed:
    """What one step found."""

    rows: int = 0
    damage: list[str] = field(default_factory=list)
    last: bool = False
    """Everything has been read once."""


class Scrub:
    """Repeated passes over a ledger and its archive. Each step has its own connection."""

    def __init__(self, ledger: Path) -> None:
        self._path = ledger
        self._begin()

    def _begin(self) -> None:
        self._tables = [*checked_columns(), CHUNKS]
        self._after: tuple[Any, ...] | None = None
        self._archives: list[ArchiveRow] | None = None

    def step(self) -> Scrubbed:
        """Read on. Raises: sqlite3.OperationalError when the ledger cannot be read now."""
        found = Scrubbed()
        with closing(self._connect()) as connection:
            if self._tables:
                self._read_table(connection, self._tables[0], found)
                return found
            if self._archives is None:
                try:
                    self._archives = Reader(self._path, connection).rows(ArchiveRow, "ORDER BY archive")
                except StoreCorrupt:
                    self._archives = []  # found with its table
        if self._archives:
            _check_archive(self._path.parent, self._archives.pop(), found)
        if not self._archives:
            found.last = True
            self._begin()
        return found

    def _connect(self) -> sqlite3.Connection:
        uri = f"{self._path.resolve().as_uri()}?mode=ro"
        return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=BUSY_S)

    def _read_table(self, connection: sqlite3.Connection, table: str, found: Scrubbed) -> None:
        keys = _KEYS.get(table, ("rowid",))
        after = _FIRST.get(table, (-1,)) if self._after is None else self._after
        columns = CHUNK_COLUMNS if table == CHUNKS else ", ".join([*checked_columns()[table], "checksum"])
        names, marks = ", ".join(keys), ", ".join("?" for _ in keys)
        query = f"SELECT {names}, {columns} FROM {table} WHERE ({names}) > ({marks}) ORDER BY {names} LIMIT {ROWS}"
        try:
            rows = connection.execute(query, after).fetchall()
        except sqlite3.OperationalError:
            raise
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            found.damage.append(f"table {table} cannot be read after {after}: {error}")
            rows = []
        for row in rows:
            key, values = row[: len(keys)], row[len(keys) :]
            if not _is_whole(table, values):
                found.damage.append(f"the row {', '.join(map(repr, key))} of {table} was changed on the disk")
        found.rows += len(rows)
        if len(rows) == ROWS:
            self._after = rows[-1][: len(keys)]
        else:
            self._tables.pop(0)
            self._after = None


def _is_whole(table: str, values: tuple[Any, ...]) -> bool:
    *columns, checksum = values
    if table != CHUNKS:
        return bool(row_checksum(table, tuple(columns)) == checksum)
    trajectory_id, start, epoch, num_tokens, header, token_ids, logprobs = columns
    try:
        found = chunk_checksum((trajectory_id, start, epoch, num_tokens), header, token_ids, logprobs)
    except TypeError:
        return False
    return bool(found == checksum)


def _check_archive(directory: Path, row: ArchiveRow, found: Scrubbed) -> None:
    path = directory / ARCHIVE_DIRECTORY / row.name
    try:
        digest = file_digest(path)
    except OSError as error:
        found.damage.append(f"{path.name} cannot be read ({error.strerror}): {held(row)}")
        return
    if digest != row.sha256:
        found.damage.append(f"{path.name} is not what was written: {held(row)}")

"""The chain of a ledger's commits: each one's number, its digest, and how much the ledger held after it.

A commit's digest covers the one before it and the checksums of all rows that it wrote. So two ledgers with the same
number and digest hold the same. Whether a commit is in a ledger's past can be answered for the last RECENT_COMMITS.
"""

import hashlib
import sqlite3
from collections.abc import Sequence
from typing import Final

import msgspec

from gspo_services.broker.store.schema import RECENT_COMMITS, row_checksum

COLUMNS: Final = "number, digest, chunks, tokens, batches, lines"
_DIGEST_BYTES: Final = 16


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """One commit, with totals since the run began."""

    number: int
    digest: str
    chunks: int = 0
    tokens: int = 0
    batches: int = 0
    lines: int = 0

    def next(
        self,
        checksums: Sequence[int],
        *,
        chunks: int = 0,
        tokens: int = 0,
        batches: int = 0,
        lines: int = 0,
        number: int | None = None,
    ) -> "Commit":
        """The commit after this one, which writes rows with these ``checksums`` and adds these amounts."""
        content = b"".join(checksum.to_bytes(4, "little") for checksum in checksums)
        digest = hashlib.blake2b(self.digest.encode() + content, digest_size=_DIGEST_BYTES).hexdigest()
        return Commit(
            number=self.number + 1 if number is None else number,
            digest=digest,
            chunks=self.chunks + chunks,
            tokens=self.tokens + tokens,
            batches=self.batches + batches,
            lines=self.lines + lines,
        )


def first_commit(run_id: str) -> Commit:
    """The one that makes the tables."""
    return Commit(number=0, digest=hashlib.blake2b(run_id.encode(), digest_size=_DIGEST_BYTES).hexdigest())


def write_commit(connection: sqlite3.Connection, commit: Commit) -> None:
    """Write it in the transaction that it describes."""
    values = (commit.number % RECENT_COMMITS, *msgspec.structs.astuple(commit))
    connection.execute(
        f"INSERT OR REPLACE INTO commits (slot, {COLUMNS}, checksum) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (*values, row_checksum("commits", values)),
    )


def newest_commit(connection: sqlite3.Connection) -> Commit:
    """Raises: ValueError when it is damaged or not there; sqlite3.DatabaseError."""
    return _commit(connection, "ORDER BY number DESC LIMIT 1", ())


def commit_in_past(connection: sqlite3.Connection, number: int) -> Commit | None:
    """The commit of this number; None when it is too long ago, or was never made. Raises: as ``newest_commit``."""
    try:
        return _commit(connection, "WHERE slot = ? AND number = ?", (number % RECENT_COMMITS, number))
    except LookupError:
        return None


def recent_digests(connection: sqlite3.Connection) -> dict[int, str]:
    """The digests of the commits that the ledger still knows, by number; without those of damaged rows."""
    rows = connection.execute(f"SELECT slot, {COLUMNS}, checksum FROM commits")
    return {
        number: digest
        for slot, number, digest, *rest, checksum in rows
        if row_checksum("commits", (slot, number, digest, *rest)) == checksum
    }


def remember(digests: dict[int, str], commit: Commit) -> None:
    """Add a commit to ``recent_digests``, which loses the one whose row it has."""
    digests.pop(commit.number - RECENT_COMMITS, None)
    digests[commit.number] = commit.digest


class _NoCommit(LookupError, ValueError):
    """The commit does not exist."""


def _commit(connection: sqlite3.Connection, rest: str, parameters: tuple[int, ...]) -> Commit:
    found = connection.execute(f"SELECT slot, {COLUMNS}, checksum FROM commits {rest}", parameters).fetchone()
    if found is None:
        raise _NoCommit("the table commits has no such row")
    *values, checksum = found
    if row_checksum("commits", tuple(values)) != checksum:
        raise ValueError(f"the row of commit {values[1]!r:.40} was changed on the disk")
    return msgspec.convert(dict(zip(Commit.__struct_fields__, values[1:], strict=True)), Commit)

"""The run's log in PostgreSQL: each commit is one row, which only the leader may add."""

from collections.abc import Iterator
from typing import Any, Final

import psycopg

from gspo_services.broker.standby.database.connection import Database
from gspo_services.broker.standby.database.errors import LeadershipLost
from gspo_services.broker.store import Commit, LedgerDiverged, StoreUnavailable

COLUMNS: Final = "number, digest, chunks, tokens, batches, lines"
READ_BYTES: Final = 8 << 20
"""Of content in one read, roughly: a long log is applied without holding it in memory."""
APPEND: Final = """
WITH own AS (
    UPDATE {s}.leader SET renewals = renewals + 1, renewed_at = clock_timestamp(), confirmed = greatest(confirmed, %s)
    WHERE epoch = %s AND NOT released RETURNING epoch
)
INSERT INTO {s}.commits (number, digest, chunks, tokens, batches, lines, content, epoch)
SELECT %s, %s, %s, %s, %s, %s, %b, epoch FROM own
WHERE %s = 0 OR EXISTS (SELECT 1 FROM {s}.commits WHERE number = %s AND digest = %s)
RETURNING number
"""
"""One statement. The row of the leader is locked until it ends: whoever takes over
waits for it, or makes it insert nothing. The commit before must be there: a server that has lost some gets no more.
"""
RENEW: Final = """
UPDATE {s}.leader SET renewals = renewals + 1, renewed_at = clock_timestamp(), confirmed = greatest(confirmed, %s)
WHERE epoch = %s AND NOT released RETURNING epoch
"""


class DatabaseLog:
    """The log, for the one thread that has ``database``. Appending needs an ``epoch``, which the leader has."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.epoch = 0
        self.confirmed = 0
        """The newest commit that is known to be on two machines."""

    def append(self, commit: Commit, before: Commit, content: bytes) -> None:
        """Add a commit with its rows; see ``CommitLog``. Raises: StoreUnavailable, LeadershipLost, LedgerDiverged."""
        values = (commit.number, commit.digest, commit.chunks, commit.tokens, commit.batches, commit.lines, content)
        parameters = (before.number, self.epoch, *values, before.number, before.number, before.digest)
        try:
            rows, doubt = self.database.commit(APPEND.format(s=self.database.schema), parameters)
        except psycopg.errors.UniqueViolation:
            self._settle(commit)
        else:
            if not rows:
                self._say_why_not(commit, before)
            if doubt:
                self._confirm(commit)
            else:
                self.confirmed = commit.number

    def renew(self) -> None:
        """Say that the leader lives, and which commits count. Raises: StoreUnavailable, LeadershipLost."""
        self._renew(self.confirmed)

    def newest(self) -> Commit | None:
        """The last commit; None in an empty log. It may not be on two machines yet."""
        return next(self._commits("ORDER BY number DESC LIMIT 1", ()), None)

    def commit(self, number: int) -> Commit | None:
        """The commit of this number."""
        return next(self._commits("WHERE number = %s", (number,)), None)

    def after(self, number: int, end: int) -> list[tuple[Commit, bytes]]:
        """The commits from ``number`` + 1 up to ``end``, in order, with their content; at least one if there is any, and
        about READ_BYTES."""
        rows = self._run(
            f"SELECT {COLUMNS}, content FROM ("
            "SELECT *, sum(length(content)) OVER (ORDER BY number) AS size FROM {s}.commits "
            "WHERE number > %s AND number <= %s AND number <= %s + 4096"
            ") AS next WHERE size - length(content) < %s ORDER BY number",
            (number, end, number, READ_BYTES),
        )
        return [(_commit(row[:-1]), bytes(row[-1])) for row in rows]

    def _settle(self, commit: Commit) -> None:
        """There is a commit of this number: ours, whose answer was lost, or another broker's."""
        rows = self._run("SELECT epoch, digest FROM {s}.commits WHERE number = %s", (commit.number,))
        if rows and rows[0] == (self.epoch, commit.digest):
            self._confirm(commit)
            return
        self._require_lead()
        raise LedgerDiverged(
            f"{self.database.where}: commit {commit.number} in it is another one than this ledger's (digest "
            f"{rows[0][1] if rows else 'none'}, here {commit.digest}): the log was restored or changed; start this broker "
            "again with an empty run.directory to follow the log"
        )

    def _confirm(self, commit: Commit) -> None:
        """A commit that is there may be on one machine only: a wait for the standby that was cancelled leaves it visible. A
        later commit that waits for the standby covers all before it."""
        self._renew(commit.number)
        self.confirmed = commit.number

    def _renew(self, confirmed: int) -> None:
        rows, doubt = self.database.commit(RENEW.format(s=self.database.schema), (confirmed, self.epoch))
        if not rows:
            self._require_lead()
        if doubt or not rows:
            reason = doubt or "the leader's row is changed by others"
            raise StoreUnavailable(f"{self.database.where}: nothing is acknowledged, because {reason}")

    def _say_why_not(self, commit: Commit, before: Commit) -> None:
        self._require_lead()
        newest = self.newest()
        at = "is empty" if newest is None else f"ends at commit {newest.number} with digest {newest.digest}"
        raise LedgerDiverged(
            f"{self.database.where}: its log {at}, and commit {before.number} with digest {before.digest} was acknowledged: "
            "it was restored from a backup, or failed over to a server that did not have everything. Fail over to one that "
            f"has, or start a new run; commit {commit.number} was not acknowledged"
        )

    def _require_lead(self) -> None:
        rows = self._run("SELECT epoch, holder, released FROM {s}.leader")
        epoch, holder, released = rows[0] if rows else (0, "", True)
        if epoch != self.epoch or released:
            by = f"nobody ({holder or 'its row is gone'} gave it up)" if released else f"{holder} (epoch {epoch})"
            raise LeadershipLost(
                f"the run is led by {by}, and this broker had epoch {self.epoch}: nothing of what it had not acknowledged "
                "counts. Start it again, and it is a standby"
            )

    def _commits(self, rest: str, parameters: tuple[Any, ...]) -> Iterator[Commit]:
        for row in self._run(f"SELECT {COLUMNS} FROM {{s}}.commits {rest}", parameters):
            yield _commit(row)

    def _run(self, statement: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        return self.database.run(statement.format(s=self.database.schema), parameters)


def _commit(row: tuple[Any, ...]) -> Commit:
    number, digest, chunks, tokens, batches, lines = row
    return Commit(number=number, digest=digest, chunks=chunks, tokens=tokens, batches=batches, lines=lines)

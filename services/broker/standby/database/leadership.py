"""Who leads a run: one row in the database, taken by whoever saw it unchanged for long enough."""

from typing import Final

import msgspec

from gspo_services.broker.standby.database.connection import Database

LOOK: Final = "SELECT epoch, holder, renewals, released, confirmed FROM {s}.leader"
CLAIM: Final = """
UPDATE {s}.leader SET epoch = epoch + 1, holder = %s, renewals = renewals + 1, released = false,
    renewed_at = clock_timestamp()
WHERE epoch = %s AND renewals = %s RETURNING epoch
"""
"""Nothing is changed when the leader has renewed since it was looked at."""
RELEASE: Final = "UPDATE {s}.leader SET released = true WHERE epoch = %s"


class LeaderRow(msgspec.Struct, frozen=True):
    """The leader, as the database knows it."""

    epoch: int
    holder: str
    """Host and process."""
    renewals: int
    """Grows about every second while the leader lives, and with each commit."""
    released: bool
    """It has ended in order, or there was none yet."""
    confirmed: int
    """Commits up to this one are on two machines."""


def leader_of(database: Database) -> LeaderRow:
    """Raises: StoreUnavailable, DatabaseRefused."""
    return LeaderRow(*database.run(LOOK.format(s=database.schema))[0])


def claim(database: Database, seen: LeaderRow, holder: str) -> int | None:
    """Take the place of ``seen``. Returns the new epoch; None when it is not the leader any more, or lives.

    Raises: StoreUnavailable, after which the place may be taken in our name: nobody uses that epoch then.
    """
    rows, _ = database.commit(CLAIM.format(s=database.schema), (holder, seen.epoch, seen.renewals))
    return rows[0][0] if rows else None


def release(database: Database, epoch: int) -> None:
    """Let another broker take the place at once. Raises: StoreUnavailable."""
    database.run(RELEASE.format(s=database.schema), (epoch,))

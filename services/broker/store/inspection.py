"""Inspects a run's ledger and the files beside it without changing them, and says what is lost."""

import sqlite3
from pathlib import Path
from typing import Final

from gspo_services.broker.store.damage import (
    Evidence,
    Loss,
    Recorded,
    StoreDamaged,
    loss_of,
    loss_without_ledger,
    read_evidence,
)
from gspo_services.broker.store.mark import MARK_FILE, Mark, MarkFile
from gspo_services.broker.store.reader import EmptyDatabase, NoLedger, OtherSchema, Reader, StoreCorrupt, reading_file

NO_DAMAGE: Final = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_IOERR)
"""Another process has the file, memory is short, or the disk is away."""
WAY_ON = (
    "Nothing was written: copy the directory away before anything else. Then put back a backup of the ledger with what "
    "was beside it, or go on with what is left: `gspo accept-loss {directory}` records the loss in the ledger for ever"
)
WAY_ON_WITHOUT = (
    "Put the ledger back from a backup, or choose another run.directory for a new run; a checkpoint's export can be its "
    "model.path. To begin again here, move everything in {directory} away first"
)


def require_whole(ledger: Path) -> None:
    """Check that nothing acknowledged is missing, before a writer opens ``ledger``.

    Raises: StoreDamaged with what is lost and the way on; StoreCorrupt.
    """
    loss = inspect(ledger)
    if loss:
        way_on = WAY_ON.format(directory=ledger.parent) if has_content(ledger) else way_on_without(ledger)
        raise StoreDamaged(f"{ledger}: {loss}. {way_on}")


def inspect(ledger: Path) -> Loss:
    """What is missing from ``ledger``, judged by the files beside it.

    A ledger of another schema, or a file that never was one, is left to whoever opens it. Raises: StoreCorrupt; OSError;
    sqlite3.OperationalError for a ledger that cannot be read now.
    """
    evidence = read_evidence(ledger.parent, ledger)
    if not has_content(ledger):
        return loss_without_ledger(evidence)
    try:
        with reading_file(ledger) as connection:
            return loss_of(evidence, recorded(Reader(ledger, connection), evidence))
    except OtherSchema:
        return Loss()
    except NoLedger as error:
        if isinstance(error.__cause__, sqlite3.OperationalError) and error.__cause__.sqlite_errorcode & 0xFF in NO_DAMAGE:
            raise error.__cause__ from None
        if evidence.mark is None:
            return Loss()
        raise StoreCorrupt(f"{error}, and {MARK_FILE} says that it was one. {way_on_without(ledger)}") from error


def mark_ledger(ledger: Path) -> None:
    """Write the mark of a ledger that was copied or rewritten, as far as it goes. Raises: StoreCorrupt, OSError."""
    with reading_file(ledger) as connection:
        reader = Reader(ledger, connection)
        mark = Mark(run_id=reader.meta_value("run_id"), commit=reader.newest_commit())
    file = MarkFile(ledger.with_name(MARK_FILE))
    file.write(mark)
    file.close()


def recorded(reader: Reader, evidence: Evidence) -> Recorded:
    """What an open ledger says of itself; ``evidence`` was read before it was opened. Raises: StoreCorrupt."""
    mark = evidence.mark
    return Recorded(
        run_id=reader.meta_value("run_id"),
        newest=reader.newest_commit(),
        marked=None if mark is None else reader.commit_in_past(mark.commit.number),
    )


def has_content(ledger: Path) -> bool:
    """Whether there is anything to open. A young ledger has all its tables in the log, and none without it."""
    if not ledger.is_file() or not ledger.stat().st_size:
        return False
    try:
        with reading_file(ledger):
            return True
    except EmptyDatabase:
        return False
    except NoLedger:
        return True


def way_on_without(ledger: Path) -> str:
    """What to do when there is no ledger."""
    return WAY_ON_WITHOUT.format(directory=ledger.parent)

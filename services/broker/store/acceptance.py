"""Goes on from what is left of a ledger: a person's decision, recorded in the ledger for ever."""

import json
import shutil
import sqlite3
from pathlib import Path

from gspo.files import make_partial_directory, partial_path, publish_directory, replace_file
from gspo_services.broker.metrics_file import METRICS_FILE
from gspo_services.broker.store.commits import write_commit
from gspo_services.broker.store.damage import WAL_SUFFIX, Loss, StoreDamaged, checkpoint_position
from gspo_services.broker.store.inspection import has_content, inspect, way_on_without
from gspo_services.broker.store.lock import LedgerLock, LockHeldError
from gspo_services.broker.store.mark import MARK_FILE, Mark, MarkFile, read_mark
from gspo_services.broker.store.reader import Reader, StoreCorrupt, reading_file
from gspo_services.broker.store.schema import LOG_KEY, row_checksum
from gspo_services.broker.store.store import StoreUnavailable


def accept_loss(ledger: Path) -> tuple[Loss, Path] | None:
    """Record what ``ledger`` has lost, so that a broker continues from what is left. None: nothing is missing.

    What is there now is copied to a directory beside it first. Checkpoints of batches whose training the ledger does not
    know, or no longer, are moved there: they are trained again. Returns the loss and that directory.

    Raises: StoreDamaged when there is no ledger to go on from, StoreCorrupt when it cannot be read, StoreUnavailable while a
    broker has it, OSError.
    """
    if not has_content(ledger):
        raise StoreDamaged(f"{ledger}: there is nothing to go on from. {way_on_without(ledger)}")
    try:
        lock = LedgerLock(ledger)
    except LockHeldError as error:
        raise StoreUnavailable(f"{ledger}: a broker has it open ({error}); stop it first") from error
    try:
        loss = inspect(ledger)
        return (loss, _accept(ledger, loss)) if loss else None
    finally:
        lock.release()


def _accept(ledger: Path, loss: Loss) -> Path:
    with reading_file(ledger) as opened:
        if LOG_KEY in Reader(ledger, opened).meta():
            raise StoreDamaged(
                f"{ledger}: its commits are in a database, too (broker.database): start the broker, and it gets back from "
                "there what is missing here"
            )
    aside = _keep(ledger)
    mark = read_mark(ledger.with_name(MARK_FILE))
    connection = sqlite3.connect(ledger, isolation_level=None)
    try:
        reader = Reader(ledger, connection)
        newest, run_id = reader.newest_commit(), reader.meta_value("run_id")
        trained = reader.number("SELECT count(DISTINCT batch) FROM trained")
        line = json.dumps({"text": str(loss), **_amounts(loss), "kept": aside.name})
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("BEGIN IMMEDIATE")
        (number,) = connection.execute("SELECT coalesce(max(loss), 0) + 1 FROM losses").fetchone()
        checksum = row_checksum("losses", (number, line))
        connection.execute("INSERT INTO losses (loss, line, checksum) VALUES (?, ?, ?)", (number, line, checksum))
        # After both pasts: neither the lost commits' numbers nor the ledger's are used again.
        after = max(newest.number, 0 if mark is None else mark.commit.number) + 1
        commit = newest.next([checksum], number=after)
        write_commit(connection, commit)
        connection.execute("COMMIT")
    except sqlite3.OperationalError as error:
        shutil.rmtree(aside)
        raise _unkept(ledger, error) from error
    except sqlite3.DatabaseError as error:
        raise StoreCorrupt(f"{ledger}: cannot be written: {error}; what it was is in {aside}") from error
    finally:
        connection.close()
    _move_lost_checkpoints(ledger.parent, trained, aside)
    forget_commits(ledger.parent)
    if loss.lines:
        # The broker writes it again from the ledger; the lines are in ``aside``.
        ledger.with_name(METRICS_FILE).unlink(missing_ok=True)
    file = MarkFile(ledger.with_name(MARK_FILE))
    file.write(Mark(run_id=run_id, commit=commit))
    file.close()
    return aside


def forget_commits(directory: Path) -> None:
    """Have the learner of a run take any past of its ledger, because a person has chosen another one: it notes a commit."""
    note = directory / "checkpoints" / "last-version"
    try:
        found = json.loads(note.read_bytes())
    except (OSError, ValueError, RecursionError):
        return  # There is none, or the learner will say what is wrong with it.
    if isinstance(found, dict) and found.pop("commits", None):
        replace_file(note, json.dumps(found) + "\n")


def _amounts(loss: Loss) -> dict[str, int]:
    return {name: getattr(loss, name) for name in ("commits", "chunks", "tokens", "batches", "lines")}


def _keep(ledger: Path) -> Path:
    """Copy the ledger and the files beside it to a new directory."""
    number = 1
    while (aside := ledger.with_name(f"damage-{number}")).exists():
        number += 1
    partial = partial_path(aside)
    try:
        make_partial_directory(aside)
        for name in (ledger.name, ledger.name + WAL_SUFFIX, MARK_FILE, METRICS_FILE):
            if (ledger.parent / name).is_file():
                shutil.copy2(ledger.parent / name, partial / name)
        publish_directory(partial, aside)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise _unkept(ledger, error) from error
    return aside


def _unkept(ledger: Path, error: Exception) -> StoreUnavailable:
    free = shutil.disk_usage(ledger.parent).free / 2**20
    return StoreUnavailable(
        f"{ledger}: no copy of it, or the loss, can be written beside it: {error}; {free:,.0f} MiB are free there. Nothing "
        "was changed: make room, or move the directory to where there is room, and repeat the command"
    )


def _move_lost_checkpoints(directory: Path, trained: int, aside: Path) -> None:
    latest = directory / "checkpoints" / "latest"
    for path in sorted(directory.glob("checkpoints/version-*-batch-*")):
        position = checkpoint_position(path.name)
        if position is not None and position > trained:
            if latest.is_file() and latest.read_text(encoding="utf-8", errors="replace").strip() == path.name:
                latest.unlink()  # the learner then takes the newest one that is left
            shutil.move(path, aside / path.name)

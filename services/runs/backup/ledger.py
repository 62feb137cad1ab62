"""Copies the ledger of a run that may be active, in one read transaction, and holds the checkpoints that belong to it.

Hard links hold the checkpoints during the copy, because the learner removes old ones.
"""

import errno
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gspo.files import partial_path
from gspo_services.broker.store import LEDGER_FILE, Reader, reading, refusing_damage
from gspo_services.runs.audit import Checkpoint, read_checkpoints
from gspo_services.runs.backup.manifest import CHECKPOINTS
from gspo_services.shared.runtime.errors import ServiceError
from gspo_services.shared.runtime.operations import is_under_way, operation_on

_HELD: Final = ".backup-"
_ATTEMPTS: Final = 5
_PAGES: Final = 4096
_SAID_FROM: Final = 65536
"""The copy of a ledger with this many pages takes long enough to show progress."""
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class _State:
    """The state of the ledger's copy."""

    covered: int
    """Batches that a checkpoint covers, according to the ledger."""
    assembled: int
    newest: int
    """Policy version."""


@contextmanager
def held_checkpoints(directory: Path) -> Iterator[Path]:
    """Make a directory for links on the file system of the checkpoints, to which ``checkpoints`` may be a link. Yield
    ``directory`` itself where nobody can write: on a snapshot, or a copy, that is mounted read-only."""
    beside = (directory / CHECKPOINTS).resolve().parent
    with operation_on(beside, "backup") as name:
        held = beside / f"{_HELD}{name}"
        try:
            for left in beside.glob(f"{_HELD}*"):
                if not is_under_way(beside, left.name.removeprefix(_HELD)):
                    shutil.rmtree(left)
            (held / CHECKPOINTS).mkdir(parents=True)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            yield directory
            return
        try:
            yield held
        finally:
            shutil.rmtree(held)


def copy_ledger(directory: Path, held: Path, partial: Path, say: Say) -> list[Checkpoint]:
    """Copy the ledger to ``partial``, and hold the checkpoints that match it in ``held``. Returns them, oldest first.

    Raises: NoLedger, StoreCorrupt; ServiceError when no checkpoint fits.
    """
    for _ in range(_ATTEMPTS):
        _hold(directory, held)
        state = _copied(directory, partial / LEDGER_FILE, say)
        # Link again: the newest checkpoint that the ledger knows may be newer than the first look.
        _hold(directory, held)
        # The other checkpoints are newer than this state of the ledger.
        fitting = [
            each
            for each in read_checkpoints(held)
            if each.batch_position <= state.assembled and each.policy_version <= state.newest
        ]
        if not state.covered or any(each.batch_position >= state.covered for each in fitting):
            return fitting
        say("the learner replaced its checkpoints meanwhile; trying again")
    raise ServiceError(
        f"{directory}: the ledger says that a checkpoint covers {state.covered} batches, but no checkpoint here does; "
        f"`gspo audit {directory}` shows what is missing"
    )


def _copied(directory: Path, copy: Path, say: Say) -> _State:
    copy.unlink(missing_ok=True)
    _snapshot(directory, copy, say)
    with closing(sqlite3.connect(copy)) as connection:
        reader = Reader(copy, connection)
        return _State(
            covered=reader.number("SELECT max(next_batch) FROM checkpointed"),
            assembled=reader.number("SELECT count(*) FROM batches"),
            newest=reader.number("SELECT max(policy_version) FROM versions"),
        )


def _snapshot(source: Path, copy: Path, say: Say) -> None:
    def progress(_: int, remaining: int, total: int) -> None:
        if total > _SAID_FROM:
            say(f"ledger: {100 * (total - remaining) // total} %")

    with refusing_damage(source / LEDGER_FILE), reading(source) as connection:
        with closing(sqlite3.connect(copy)) as target:
            connection.backup(target, pages=_PAGES, progress=progress, sleep=0)
            # One file without a log, whoever copies it on.
            target.execute("PRAGMA journal_mode = DELETE")


def _hold(directory: Path, held: Path) -> None:
    """Link every complete checkpoint that is not yet linked."""
    for checkpoint in read_checkpoints(directory):
        source, link = directory / CHECKPOINTS / checkpoint.name, held / CHECKPOINTS / checkpoint.name
        if link.exists():
            continue
        partial = partial_path(link)
        shutil.rmtree(partial, ignore_errors=True)
        try:
            shutil.copytree(source, partial, copy_function=_link)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            if (source / "checkpoint.json").is_file():
                reason = error.args[0][0][2] if isinstance(error, shutil.Error) else error
                raise OSError(f"{source} cannot be copied beside the run: {reason}") from error
            continue  # The learner is removing it right now.
        partial.rename(link)


def _link(source: str, destination: str) -> None:
    try:
        os.link(source, destination)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copy2(source, destination)

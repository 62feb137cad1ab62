"""Copies the ledgers of a run that may be active, and holds the checkpoints that belong to them.

Hard links hold the checkpoints during the copy, because the learner removes old ones. Each ledger is copied in one read
transaction. Ledgers of several brokers are of one moment only if none has changed until all are copied.
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
from gspo_services.broker.store import LEDGER_FILE, Reader, count_requeued, reading, refusing_damage
from gspo_services.runs.audit import Checkpoint, read_checkpoints
from gspo_services.runs.ledgers import broker_name, ledger_directories
from gspo_services.shared.runtime.errors import ServiceError

CHECKPOINTS: Final = "checkpoints"
_HELD: Final = ".backup-"
_ATTEMPTS: Final = 5
_PAGES: Final = 4096
_SAID_FROM: Final = 65536
"""The copy of a ledger with this many pages takes long enough to show progress."""
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class CopiedLedgers:
    """The result of copying the ledgers."""

    checkpoints: list[Checkpoint]
    """Those that match all ledgers, oldest first. Links hold them."""
    one_moment: bool
    """Whether the copies are of one moment; otherwise they form one run only once they are rewound to a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class _State:
    """The state of one ledger's copy."""

    commit: int
    covered: int
    """Batches that a checkpoint covers, according to the ledger."""
    assembled: int
    newest: int
    """Policy version."""
    num_requeued: int
    """Groups that were quarantined and requeued, which a rewind cannot undo."""


@contextmanager
def held_checkpoints(directory: Path) -> Iterator[Path]:
    """Make a directory for links on the file system of the checkpoints, to which ``checkpoints`` may be a link. Yield
    ``directory`` itself where nobody can write: on a snapshot, or a copy, that is mounted read-only."""
    beside = (directory / CHECKPOINTS).resolve().parent
    held = beside / f"{_HELD}{os.getpid()}"
    try:
        for left in beside.glob(f"{_HELD}*"):
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


def copy_ledgers(directory: Path, held: Path, partial: Path, say: Say) -> CopiedLedgers:
    """Copy the ledger of each broker to its place in ``partial``, and hold the checkpoints that belong to them in ``held``.

    Raises: NoLedger, StoreCorrupt; ServiceError when no checkpoint fits.
    """
    sources = ledger_directories(directory)
    for _ in range(_ATTEMPTS):
        _hold(directory, held)
        states = [_copied(source, partial / source.relative_to(directory), say) for source in sources]
        one_moment = len(sources) == 1 or [_newest_commit(source) for source in sources] == [each.commit for each in states]
        # Link again: the newest checkpoint that the ledgers know may be newer than the first look.
        _hold(directory, held)
        assembled, newest = min(each.assembled for each in states), min(each.newest for each in states)
        # The other checkpoints are newer than this state of the ledgers.
        fitting = [
            each for each in read_checkpoints(held) if each.batch_position <= assembled and each.policy_version <= newest
        ]
        covered = max(each.covered for each in states)
        if not one_moment:
            _require_rewind(directory, states, covered)
        needed = covered if one_moment else 0
        if not covered or any(each.batch_position >= needed for each in fitting):
            return CopiedLedgers(checkpoints=fitting, one_moment=one_moment)
        say("the learner replaced its checkpoints meanwhile; trying again")
    raise ServiceError(
        f"{directory}: the ledger says that a checkpoint covers {covered} batches, but no checkpoint here does; "
        f"`gspo audit {directory}` shows what is missing"
    )


def _require_rewind(directory: Path, states: list[_State], covered: int) -> None:
    """Raises: ServiceError when ledgers of different moments could not be rewound to a checkpoint."""
    why = ""
    if not covered:
        why = "no checkpoint covers any batch yet: wait for the first one (learner.checkpoint_every_batches)"
    for number, state in enumerate(states):
        if state.num_requeued:
            why = (
                f"{state.num_requeued} groups of {broker_name(number)} were quarantined and requeued: that cannot be rewound"
            )
    if why:
        raise ServiceError(
            f"{directory} is active at {len(states)} brokers, so it can only be restored to a checkpoint, but "
            f"{why}; or stop the run (gspo stop), and make the backup then"
        )


def _copied(source: Path, destination: Path, say: Say) -> _State:
    destination.mkdir(exist_ok=True)
    copy = destination / LEDGER_FILE
    copy.unlink(missing_ok=True)
    _snapshot(source, copy, say)
    with closing(sqlite3.connect(copy)) as connection:
        reader = Reader(copy, connection)
        return _State(
            commit=reader.newest_commit().number,
            covered=reader.number("SELECT max(next_batch) FROM checkpointed"),
            assembled=reader.number("SELECT count(*) FROM batches"),
            newest=reader.number("SELECT max(policy_version) FROM versions"),
            num_requeued=count_requeued(reader),
        )


def _newest_commit(source: Path) -> int:
    with reading(source) as connection:
        return Reader(source / LEDGER_FILE, connection).newest_commit().number


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

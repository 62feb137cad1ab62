"""Makes a backup of a run that may be active: its ledger, and the files that belong to it.

Everything that is copied beside the ledger never changes once it exists.
"""

import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec

from gspo.files import (
    discard_directory,
    make_partial_directory,
    publish_directory,
    remove_leftovers,
)
from gspo_services.broker.metrics_file import METRICS_FILE, MetricsFile
from gspo_services.broker.rows import ADDED_DIRECTORY, AdditionRow, ArchiveRow
from gspo_services.broker.store import (
    ARCHIVE_DIRECTORY,
    LEDGER_FILE,
    MARK_FILE,
    Reader,
    file_digest,
    mark_ledger,
    refusing_damage,
    require_whole,
)
from gspo_services.runs.audit import Checkpoint
from gspo_services.runs.backup.ledger import Say, copy_ledger, held_checkpoints
from gspo_services.runs.backup.manifest import (
    CHECKPOINTS,
    FORMAT,
    MANIFEST,
    BackupDamaged,
    BackupFile,
    BackupManifest,
    list_backups,
)
from gspo_services.shared.runtime.errors import NoRoomError, ServiceError, is_for_want_of_room
from gspo_services.shared.runtime.foreign import ForeignError, ForeignTree
from gspo_services.shared.runtime.operations import only_operation, operation_on
from gspo_services.shared.settings import SCORES_DIRECTORY, SETTINGS_FILE

_BLOCK: Final = 1 << 20
BUSY_S: Final = 60.0


def back_up(directory: Path, destination: Path, say: Say) -> tuple[Path, BackupManifest]:
    """Copy the run in ``directory`` to a new directory in ``destination``. ``say`` gets lines about the progress.

    Files that an earlier backup there holds are hard-linked. Raises: NoLedger, ConfigurationError, StoreCorrupt,
    StoreDamaged, BackupDamaged, ServiceError, OSError.
    """
    if (directory / LEDGER_FILE).is_file():
        # The copy gets its own mark, which must not hide what is missing here.
        require_whole(directory / LEDGER_FILE)
    way_out = "wait for it, or name another directory"
    # Another one would take what is being written for a leftover.
    with ExitStack() as owning:
        with told_of_room(destination):
            owning.enter_context(only_operation(destination, "backup", way_out, inside=True))
            owning.enter_context(operation_on(directory, "backup"))
        return _back_up(directory, destination, say)


def _back_up(directory: Path, destination: Path, say: Say) -> tuple[Path, BackupManifest]:
    remove_leftovers(destination)
    earlier = list_backups(destination)
    name = f"{datetime.now(tz=UTC):%Y-%m-%dT%H-%M-%S.%fZ}"
    partial = make_partial_directory(destination / name)
    with all_or_nothing(partial):
        with held_checkpoints(directory) as held:
            checkpoints = copy_ledger(directory, held, partial, say)
            copying = _Copying(partial, earlier[-1] if earlier else None, say)
            for checkpoint in checkpoints:
                for path in sorted((held / CHECKPOINTS / checkpoint.name).rglob("*")):
                    if path.is_file():
                        copying.add(str(path.relative_to(held)), path)
            if (directory / CHECKPOINTS / "last-version").is_file():
                copying.add(f"{CHECKPOINTS}/last-version", directory / CHECKPOINTS / "last-version")
            # After the ledger: it holds no batch that was trained and is not scored there.
            for path in sorted((directory / SCORES_DIRECTORY).glob("*.sqlite")):
                copying.add_database(f"{SCORES_DIRECTORY}/{path.name}", path)
        number = earlier[-1][1].number + 1 if earlier else 1
        manifest = _rest(directory, partial, name, number, copying, checkpoints)
        (partial / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
        publish_directory(partial, destination / name)
    return destination / name, manifest


@contextmanager
def all_or_nothing(partial: Path) -> Iterator[None]:
    """Remove ``partial`` when the block fails. Raises: as ``told_of_room``."""
    with told_of_room(partial.parent):
        try:
            yield
        except BaseException:
            if partial.exists():
                discard_directory(partial)
            raise


@contextmanager
def told_of_room(place: Path) -> Iterator[None]:
    """Raises: NoRoomError, or ServiceError for SQLite's errors, with the room that there was when the block failed."""
    try:
        yield
    except BaseException as error:
        free = shutil.disk_usage(place).free / 2**20
        is_full = is_for_want_of_room(error)
        # SQLite also calls a full disk an I/O error.
        if not is_full and not isinstance(error, sqlite3.OperationalError):
            raise
        raise (NoRoomError if is_full else ServiceError)(
            f"{place.absolute()} cannot be written: {error}; {free:,.0f} MiB were free there, and nothing was "
            "kept. Make room and repeat the command"
        ) from error


def _rest(
    directory: Path, partial: Path, name: str, number: int, copying: "_Copying", checkpoints: list[Checkpoint]
) -> BackupManifest:
    """Copy the files that the ledger's copy names, and write the manifest."""
    run_id, num_batches = _beside(directory, partial, copying)
    if checkpoints:
        latest = f"{CHECKPOINTS}/latest"
        (partial / latest).write_text(checkpoints[-1].name + "\n", encoding="utf-8")
        copying.describe(latest)
    return BackupManifest(
        format=FORMAT,
        name=name,
        run_id=run_id,
        source=str(directory.resolve()),
        num_batches=num_batches,
        positions=sorted({checkpoint.batch_position for checkpoint in checkpoints}),
        new_bytes=copying.new_bytes,
        files=copying.files,
        number=number,
    )


def _beside(directory: Path, partial: Path, copying: "_Copying") -> tuple[str, int]:
    """Copy the files that the ledger's copy names. Returns its run id, and its number of batches."""
    ledger = partial / LEDGER_FILE

    def add(path: str) -> BackupFile:
        return copying.add(path, directory / path)

    add(SETTINGS_FILE)
    with refusing_damage(ledger), closing(sqlite3.connect(ledger)) as connection:
        reader = Reader(ledger, connection)
        for row in reader.rows(ArchiveRow, "ORDER BY archive"):
            path = f"{ARCHIVE_DIRECTORY}/{row.name}"
            if add(path).sha256 != row.sha256:
                raise BackupDamaged(f"{directory / path} is damaged: `gspo audit {directory}` says what it held")
        for addition in reader.rows(AdditionRow, "ORDER BY number"):
            add(f"{ADDED_DIRECTORY}/{addition.name}")
        MetricsFile(partial / METRICS_FILE).append(reader.metrics_after(0))
        num_batches = reader.number("SELECT count(*) FROM batches")
        run_id = str(connection.execute("SELECT value FROM meta WHERE key = 'run_id'").fetchone()[0])
    mark_ledger(ledger)
    for path in (LEDGER_FILE, MARK_FILE, METRICS_FILE):
        if (partial / path).is_file():
            copying.describe(path)
    return run_id, num_batches


class _Copying:
    """Copies files into a backup, or links to those of the previous backup."""

    def __init__(self, partial: Path, earlier: tuple[Path, BackupManifest] | None, say: Say) -> None:
        self._partial = partial
        self._earlier = earlier
        self._say = say
        self.files: dict[str, BackupFile] = {}
        self.new_bytes = 0

    def add(self, path: str, source: Path) -> BackupFile:
        """Copy ``source`` to ``path`` of the backup. Raises: OSError."""
        destination = self._partial / path
        destination.parent.mkdir(parents=True, exist_ok=True)
        status = source.stat()
        linked = self._linked(path, status, destination)
        if linked is not None:
            self.files[path] = linked
            return linked
        self._say(f"{path}: {status.st_size / 2**20:.1f} MiB")
        digest = copy_and_digest(source, destination)
        os.utime(destination, ns=(status.st_atime_ns, status.st_mtime_ns))
        self.new_bytes += status.st_size
        self.files[path] = BackupFile(num_bytes=destination.stat().st_size, sha256=digest, mtime_ns=status.st_mtime_ns)
        return self.files[path]

    def _linked(self, path: str, status: os.stat_result, destination: Path) -> BackupFile | None:
        if self._earlier is None:
            return None
        directory, manifest = self._earlier
        former = manifest.files.get(path)
        if former is None or (former.num_bytes, former.mtime_ns) != (status.st_size, status.st_mtime_ns):
            return None
        try:
            # Of somebody else's backups, perhaps.
            if ForeignTree(directory).num_bytes(path) != former.num_bytes:
                return None
            os.link(directory / path, destination, follow_symlinks=False)
        except (OSError, ForeignError):  # also a file system without links
            return None
        return former

    def add_database(self, name: str, source: Path) -> None:
        """Copy what a SQLite file holds, while it may be written."""
        copy = self._partial / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        # Not mode=ro, which cannot roll back what a killed process left half written.
        with closing(sqlite3.connect(f"{source.resolve().as_uri()}?mode=rw", uri=True, timeout=BUSY_S)) as original:
            with closing(sqlite3.connect(copy)) as connection:
                original.backup(connection)
        self.describe(name)

    def describe(self, path: str) -> None:
        """Add a file that was written into the backup to the manifest."""
        file = self._partial / path
        status = file.stat()
        digest = file_digest(file)
        self.new_bytes += status.st_size
        self.files[path] = BackupFile(num_bytes=status.st_size, sha256=digest, mtime_ns=status.st_mtime_ns)


def copy_and_digest(source: Path, destination: Path) -> str:
    """Copy a file; returns the SHA-256 of the bytes read, in hexadecimal. Raises: OSError."""
    digest = sha256()
    with source.open("rb") as reading_from, destination.open("wb") as writing_to:
        while block := reading_from.read(_BLOCK):
            digest.update(block)
            writing_to.write(block)
    return digest.hexdigest()

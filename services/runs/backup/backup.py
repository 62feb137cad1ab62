"""Makes a backup of a run that may be going on: one state of the ledger, and the files that belong to it.

The checkpoints are held by hard links while they are copied, because the learner removes old ones. The ledger is copied in
one read transaction; everything else that is copied never changes once it is there.
"""

import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec

from services.broker.metrics_file import METRICS_FILE, MetricsFile
from services.broker.rows import ADDED_DIRECTORY, AdditionRow, ArchiveRow
from services.broker.store import (
    ARCHIVE_DIRECTORY,
    LEDGER_FILE,
    MARK_FILE,
    Reader,
    file_digest,
    mark_ledger,
    reading,
    refusing_damage,
    require_whole,
)
from services.runs.audit import Checkpoint, read_checkpoints
from services.runs.backup.manifest import FORMAT, MANIFEST, BackupDamaged, BackupFile, BackupManifest, list_backups
from services.runtime.durable import make_partial_directory, partial_path, publish_directory, remove_leftovers
from services.runtime.errors import ConfigurationError, ServiceError
from services.runtime.settings import read_run_settings

CHECKPOINTS: Final = "checkpoints"
SETTINGS: Final = "settings.json"
_HELD: Final = ".backup-"
_ATTEMPTS: Final = 5
_PAGES: Final = 4096
_SAID_FROM: Final = 65536
"""Pages of a ledger whose copy takes long enough to be shown."""
_BLOCK: Final = 1 << 20
Say = Callable[[str], None]


def back_up(directory: Path, destination: Path, say: Say) -> tuple[Path, BackupManifest]:
    """Copy the run in ``directory`` to a new directory in ``destination``. ``say`` gets lines about the progress.

    What an earlier backup there holds already is linked to. Raises: NoLedger, ConfigurationError, StoreCorrupt,
    StoreDamaged, BackupDamaged, ServiceError, OSError.
    """
    require_one_broker(directory, "backup")
    if (directory / LEDGER_FILE).is_file():
        # The copy gets a mark of its own, which must not hide what is missing here.
        require_whole(directory / LEDGER_FILE)
    destination.mkdir(parents=True, exist_ok=True)
    remove_leftovers(destination)
    earlier = list_backups(destination)
    name = f"{datetime.now(tz=UTC):%Y-%m-%dT%H-%M-%S.%fZ}"
    partial = make_partial_directory(destination / name)
    with _held_checkpoints(directory) as held:
        checkpoints = _copy_ledger(directory, held, partial / LEDGER_FILE, say)
        copying = _Copying(partial, earlier[-1] if earlier else None, say)
        copying.add(SETTINGS, directory / SETTINGS)
        for checkpoint in checkpoints:
            for path in sorted((held / CHECKPOINTS / checkpoint.name).rglob("*")):
                if path.is_file():
                    copying.add(str(path.relative_to(held)), path)
        if (directory / CHECKPOINTS / "last-version").is_file():
            copying.add(f"{CHECKPOINTS}/last-version", directory / CHECKPOINTS / "last-version")
    manifest = _rest(directory, partial, name, copying, checkpoints)
    (partial / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    publish_directory(partial, destination / name)
    return destination / name, manifest


def require_one_broker(directory: Path, command: str) -> None:
    """Raises: ConfigurationError for a run of several brokers."""
    num_brokers = read_run_settings(directory).broker.num_brokers
    if num_brokers > 1:
        raise ConfigurationError(
            f"{directory} is shared by {num_brokers} brokers, and gspo {command} knows runs of one: the ledgers must be of "
            "one moment. Stop the run (gspo stop), and copy its whole directory (cp -a)"
        )


def _rest(directory: Path, partial: Path, name: str, copying: "_Copying", checkpoints: list[Checkpoint]) -> BackupManifest:
    """Copy what the ledger's copy names, and describe the whole."""
    with refusing_damage(partial / LEDGER_FILE), closing(sqlite3.connect(partial / LEDGER_FILE)) as connection:
        reader = Reader(partial / LEDGER_FILE, connection)
        for row in reader.rows(ArchiveRow, "ORDER BY archive"):
            path = f"{ARCHIVE_DIRECTORY}/{row.name}"
            if copying.add(path, directory / path).sha256 != row.sha256:
                raise BackupDamaged(f"{directory / path} is damaged: `gspo audit {directory}` says what it held")
        for addition in reader.rows(AdditionRow, "ORDER BY number"):
            copying.add(f"{ADDED_DIRECTORY}/{addition.name}", directory / ADDED_DIRECTORY / addition.name)
        MetricsFile(partial / METRICS_FILE).append(reader.metrics_after(0))
        num_batches = reader.number("SELECT count(*) FROM batches")
        run_id = str(connection.execute("SELECT value FROM meta WHERE key = 'run_id'").fetchone()[0])
    if checkpoints:
        (partial / CHECKPOINTS / "latest").write_text(checkpoints[-1].name + "\n", encoding="utf-8")
    mark_ledger(partial / LEDGER_FILE)
    for path in (LEDGER_FILE, MARK_FILE, METRICS_FILE, f"{CHECKPOINTS}/latest"):
        if (partial / path).is_file():
            copying.describe(path)
    return BackupManifest(
        format=FORMAT,
        name=name,
        run_id=run_id,
        source=str(directory.resolve()),
        num_batches=num_batches,
        positions=sorted({checkpoint.batch_position for checkpoint in checkpoints}),
        new_bytes=copying.new_bytes,
        files=copying.files,
    )


@contextmanager
def _held_checkpoints(directory: Path) -> Iterator[Path]:
    """A directory for links on the file system of the checkpoints."""
    for left in directory.glob(f"{_HELD}*"):
        shutil.rmtree(left)
    held = directory / f"{_HELD}{os.getpid()}"
    (held / CHECKPOINTS).mkdir(parents=True)
    try:
        yield held
    finally:
        shutil.rmtree(held)


def _copy_ledger(directory: Path, held: Path, copy: Path, say: Say) -> list[Checkpoint]:
    """Copy one state of the ledger, and hold the checkpoints that belong to it. Returns these, oldest first."""
    for _ in range(_ATTEMPTS):
        _hold(directory, held)
        copy.unlink(missing_ok=True)
        _snapshot(directory, copy, say)
        # Once more: the newest checkpoint that the ledger knows may be newer than the first look.
        _hold(directory, held)
        with closing(sqlite3.connect(copy)) as connection:
            reader = Reader(copy, connection)
            covered = reader.number("SELECT max(next_batch) FROM checkpointed")
            assembled = reader.number("SELECT count(*) FROM batches")
            newest = reader.number("SELECT max(policy_version) FROM versions")
        # Others are newer than this state of the ledger.
        fitting = [
            each for each in read_checkpoints(held) if each.batch_position <= assembled and each.policy_version <= newest
        ]
        if not covered or any(each.batch_position >= covered for each in fitting):
            return fitting
        say("the learner replaced its checkpoints meanwhile; once more")
    raise ServiceError(
        f"{directory}: a checkpoint covers {covered} batches, says the ledger, and none is there that does; "
        f"`gspo audit {directory}` says what is missing"
    )


def _hold(directory: Path, held: Path) -> None:
    """Link every complete checkpoint that is not held yet."""
    for checkpoint in read_checkpoints(directory):
        source, link = directory / CHECKPOINTS / checkpoint.name, held / CHECKPOINTS / checkpoint.name
        if link.exists():
            continue
        partial = partial_path(link)
        shutil.rmtree(partial, ignore_errors=True)
        try:
            shutil.copytree(source, partial, copy_function=_link)
        except (FileNotFoundError, shutil.Error):
            shutil.rmtree(partial, ignore_errors=True)  # The learner removes it just now.
            continue
        partial.rename(link)


def _link(source: str, destination: str) -> None:
    try:
        os.link(source, destination)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copy2(source, destination)


def _snapshot(directory: Path, copy: Path, say: Say) -> None:
    def progress(_: int, remaining: int, total: int) -> None:
        if total > _SAID_FROM:
            say(f"ledger: {100 * (total - remaining) // total} %")

    with refusing_damage(directory / LEDGER_FILE), reading(directory) as connection:
        with closing(sqlite3.connect(copy)) as target:
            connection.backup(target, pages=_PAGES, progress=progress, sleep=0)
            # One file without a log, whoever copies it on.
            target.execute("PRAGMA journal_mode = DELETE")


class _Copying:
    """Copies files into a backup, or links to those of the one before it."""

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
            os.link(directory / path, destination)
        except OSError:  # a file system without links
            return None
        return former

    def describe(self, path: str) -> None:
        """Enter a file that was written into the backup."""
        file = self._partial / path
        status = file.stat()
        digest = file_digest(file)
        self.new_bytes += status.st_size
        self.files[path] = BackupFile(num_bytes=status.st_size, sha256=digest, mtime_ns=status.st_mtime_ns)


def copy_and_digest(source: Path, destination: Path) -> str:
    """Copy a file; returns the SHA-256 of what was read, in hexadecimal. Raises: OSError."""
    digest = sha256()
    with source.open("rb") as reading_from, destination.open("wb") as writing_to:
        while block := reading_from.read(_BLOCK):
            digest.update(block)
            writing_to.write(block)
    return digest.hexdigest()

"""Restores a backup into a new run directory, as it was or at a checkpoint that covers fewer batches.

On a cluster a run has two volumes: what the learner wrote is then put into a directory of its own, and RUN links to it.
"""

import json
import shutil
import sqlite3
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Final

from gspo.files import make_partial_directory, publish_directory
from gspo_services.broker.metrics_file import METRICS_FILE, MetricsFile
from gspo_services.broker.store import (
    ARCHIVE_DIRECTORY,
    LEDGER_FILE,
    Reader,
    forget_commits,
    refusing_damage,
    rewrite_ledger,
)
from gspo_services.runs.audit import Checkpoint, read_checkpoints
from gspo_services.runs.backup.backup import all_or_nothing
from gspo_services.runs.backup.manifest import (
    CHECKPOINTS,
    BackupDamaged,
    BackupFile,
    BackupManifest,
    is_newer,
    list_backups,
)
from gspo_services.shared.runtime.errors import ConfigurationError, NoRoomError
from gspo_services.shared.runtime.foreign import ForeignError, ForeignTree
from gspo_services.shared.runtime.operations import only_operation
from gspo_services.shared.settings import SCORES_DIRECTORY, SETTINGS_FILE

OF_THE_LEARNER: Final = (CHECKPOINTS, SCORES_DIRECTORY)
"""The parts of a run's directory that its learner writes, and a backup holds."""


def restore(
    source: Path, directory: Path, batch: int | None, say: Callable[[str], None], learner: Path | None = None
) -> BackupManifest:
    """Restore the backup ``source``, or the newest one in it, to ``directory``, which must not exist or be empty.

    ``batch``: only the batches before this one, with a checkpoint that covers exactly them; with several backups in
    ``source``, the newest that has it. None: everything. ``learner``: where the learner's run.directory is, which must not
    exist or be empty either; None: ``directory`` has all. The whole manifest is checked before anything is written, and
    every file is compared with its digest. The run gets a new identity, so processes of the old one cannot join it.

    Raises: ConfigurationError, BackupDamaged, NoRoomError, StoreCorrupt, OSError.
    """
    _require_new(directory, learner)
    if learner is not None:
        _require_apart(directory.resolve(), learner.resolve())
    backup, manifest = _chosen(source, batch)
    files = {name: file for name, file in manifest.files.items() if batch is None or not is_newer(name, batch)}
    _require_whole(backup, files)
    _require_room(learner or directory, sum(file.num_bytes for file in files.values()))
    with ExitStack() as owning:
        for each in filter(None, (directory, learner)):
            owning.enter_context(only_operation(each, "restore", "wait for it, or restore into another directory"))
        _require_new(directory, learner)
        say(f"restoring {backup}")
        with _made(directory, learner) as partial:
            _copy(backup, files, partial, say)
            forget_commits(partial)
            checkpoint = _newest_checkpoint(partial)
            rewind_to = None if batch is None or checkpoint is None else (batch, checkpoint.policy_version)
            _set_directory(partial / SETTINGS_FILE, directory)
            with refusing_damage(partial / LEDGER_FILE):
                rewrite_ledger(partial / LEDGER_FILE, run_id=uuid.uuid4().hex[:12], rewind_to=rewind_to)
            _after_the_ledger(partial, rewound=batch is not None)
    return manifest


def _require_new(directory: Path, learner: Path | None) -> None:
    for each in filter(None, (directory, learner)):
        if each.exists() and (not each.is_dir() or any(each.iterdir())):
            raise ConfigurationError(f"{each} is not empty: restore into a new directory, or move it away first")


def _require_apart(directory: Path, learner: Path) -> None:
    if directory.is_relative_to(learner) or learner.is_relative_to(directory):
        raise ConfigurationError(f"--learner is {learner}: name a directory that is not in {directory}, or leave it out")


@contextmanager
def _made(directory: Path, learner: Path | None) -> Iterator[Path]:
    """Yield where to write; ``directory`` appears whole after the block, and ``learner`` right before it."""
    partial = make_partial_directory(directory)
    with all_or_nothing(partial), ExitStack() as others:
        if learner is not None:
            of_learner = make_partial_directory(learner)
            others.enter_context(all_or_nothing(of_learner))
            for name in OF_THE_LEARNER:
                (of_learner / name).mkdir()
                (partial / name).symlink_to(of_learner.resolve() / name)
        yield partial
        if learner is not None:
            for name in OF_THE_LEARNER:
                (partial / name).unlink()
                (partial / name).symlink_to(learner.resolve() / name)
            publish_directory(of_learner, learner, replace=False)
        publish_directory(partial, directory, replace=False)


def _chosen(source: Path, batch: int | None) -> tuple[Path, BackupManifest]:
    found = list_backups(source) if source.is_dir() else []
    if not found:
        raise ConfigurationError(f"{source} holds no complete backup: give the directory that `gspo backup` wrote to")
    having = [each for each in found if batch is None or batch in each[1].positions]
    if not having:
        there = sorted({position for _, manifest in found for position in manifest.positions})
        text = ", ".join(str(position) for position in there) or "none"
        raise ConfigurationError(f"--batch is {batch}: the checkpoints in {source} cover these numbers of batches: {text}")
    return having[-1]


def _require_whole(backup: Path, files: Mapping[str, BackupFile]) -> None:
    """Raises: BackupDamaged for a file that is missing, no regular file, behind a link, or of another size."""
    try:
        ForeignTree(backup).require({name: file.num_bytes for name, file in files.items()})
    except FileNotFoundError as error:
        raise BackupDamaged(f"{error.filename} is missing: use another backup") from error
    except (ForeignError, NotADirectoryError) as error:
        raise BackupDamaged(f"{backup} is damaged, or no work of `gspo backup`: {error}; use another") from error


def _require_room(directory: Path, num_bytes: int) -> None:
    there = next(each for each in directory.absolute().parents if each.is_dir())
    if (free := shutil.disk_usage(there).free) < num_bytes:
        raise NoRoomError(
            f"{there} cannot be written: the backup has {num_bytes / 2**20:,.1f} MiB; {free / 2**20:,.0f} MiB were free "
            "there, and nothing was kept. Make room and repeat the command"
        )


def _copy(backup: Path, files: Mapping[str, BackupFile], partial: Path, say: Callable[[str], None]) -> None:
    tree = ForeignTree(backup)
    for name, file in files.items():
        destination = partial / name
        destination.parent.mkdir(parents=True, exist_ok=True)
        say(f"{name}: {file.num_bytes / 2**20:.1f} MiB")
        try:
            found = tree.copy(name, file.num_bytes, destination)
        except (ForeignError, FileNotFoundError) as error:
            raise BackupDamaged(f"{backup} changed while it was read: {error}; use another") from error
        if found != file.sha256:
            raise BackupDamaged(f"{backup / name} is damaged: it has SHA-256 {found}, {file.sha256} was copied; use another")


def _newest_checkpoint(partial: Path) -> Checkpoint | None:
    """Return the newest restored checkpoint, which ``latest`` then names."""
    found = read_checkpoints(partial)
    if not found:
        return None
    newest = max(found, key=lambda each: (each.batch_position, each.policy_version))
    (partial / CHECKPOINTS / "latest").write_text(newest.name + "\n", encoding="utf-8")
    return newest


def _set_directory(settings: Path, directory: Path) -> None:
    try:
        plain = json.loads(settings.read_bytes())
        plain["run"]["directory"] = str(directory)
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise BackupDamaged(f"{SETTINGS_FILE} of the backup is no run's: {error}; use another") from error
    settings.write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")


def _after_the_ledger(partial: Path, *, rewound: bool) -> None:
    """Write metrics.jsonl again, and remove archive files that no longer hold anything of the run."""
    if rewound:
        (partial / METRICS_FILE).unlink(missing_ok=True)
    with closing(sqlite3.connect(partial / LEDGER_FILE)) as connection:
        reader = Reader(partial / LEDGER_FILE, connection)
        if rewound:
            MetricsFile(partial / METRICS_FILE).append(reader.metrics_after(0))
        named = {name for (name,) in connection.execute("SELECT name FROM archives")}
    for path in (partial / ARCHIVE_DIRECTORY).glob("*"):
        if path.name not in named:
            path.unlink()

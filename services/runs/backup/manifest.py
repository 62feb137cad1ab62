"""The manifest of a backup: its files with their digests, and the batches that it can be restored to.

DESTINATION/2026-11-22T10-30-00Z/       one backup: a run directory, and
    backup.json                         this manifest, written last
DESTINATION/.partial-...                an interrupted backup: nothing reads it, and the next backup removes it

A backup may come from anybody: it is read through ``ForeignTree``, and has only files that ``gspo backup`` writes. With any
others SQLite would find a journal beside the ledger, and do what it says.
"""

import re
from pathlib import Path
from typing import Annotated, Final

import msgspec

from gspo_protocol.messages import Count
from gspo_services.broker.metrics_file import METRICS_FILE
from gspo_services.broker.rows import ADDED_DIRECTORY
from gspo_services.broker.store import ARCHIVE_DIRECTORY, LEDGER_FILE, MARK_FILE
from gspo_services.shared.runtime.errors import ServiceError
from gspo_services.shared.runtime.foreign import ForeignError, ForeignTree, require_names
from gspo_services.shared.settings import SCORES_DIRECTORY, SETTINGS_FILE

MANIFEST: Final = "backup.json"
FORMAT: Final = 1
CHECKPOINTS: Final = "checkpoints"
_CHECKPOINT: Final = rf"{CHECKPOINTS}/version-\d{{1,17}}-batch-(?P<batch>\d{{1,17}})/.+"
_KINDS: Final = re.compile(
    "|".join(
        (
            *map(re.escape, (LEDGER_FILE, MARK_FILE, METRICS_FILE, SETTINGS_FILE)),
            rf"{ARCHIVE_DIRECTORY}/[^/]+\.parquet",
            rf"{ADDED_DIRECTORY}/[^/]+",
            rf"{CHECKPOINTS}/(?P<note>latest|last-version)",
            _CHECKPOINT,
            rf"{SCORES_DIRECTORY}/[^/]+\.sqlite",
        )
    )
)
"""The files of a backup: no others are restored."""


class BackupDamaged(ServiceError):
    """A backup lacks a file, a file is not what was copied, or this release cannot read it. The text has the way out."""


class BackupFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a backup. ``mtime_ns``: the time of the run's file; if name, size and time match, it is not read again."""

    num_bytes: Count
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    mtime_ns: int


class BackupManifest(msgspec.Struct, frozen=True, kw_only=True):
    """backup.json"""

    format: int
    name: str
    run_id: str
    source: str
    num_batches: Count
    """Batches assembled."""
    positions: list[Count]
    """The numbers of batches that its checkpoints cover: the possible values of --batch."""
    new_bytes: int
    """Bytes that were copied; the other files are hard links to those of an earlier backup."""
    files: dict[str, BackupFile]
    number: int = 0
    """Counts the backups of a directory, from 1: a clock that was set back does not change their order. 0: of a release that
    did not count."""
    one_moment: bool = True
    num_brokers: int = 1
    """With ``one_moment`` always so here: gspo 0.1.0, which restores backups of this format, also had several brokers."""

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files.values())


class _Format(msgspec.Struct):
    """What the manifest of any release has."""

    format: int


def is_newer(name: str, batch: int) -> bool:
    """Whether a file is of a checkpoint of more batches. The note of given versions is of a future that is taken back."""
    found = _KINDS.fullmatch(name)
    return found is not None and (found["note"] is not None or int(found["batch"] or 0) > batch)


def read_manifest(backup: Path) -> BackupManifest:
    """Raises: BackupDamaged, also for a backup of another release and one with files that no backup has."""
    path = backup / MANIFEST
    try:
        content = ForeignTree(backup).read(MANIFEST)
        # First: a backup of another release may lack fields, and is not damaged.
        found = msgspec.json.decode(content, type=_Format).format
        if found == FORMAT:
            manifest = msgspec.json.decode(content, type=BackupManifest)
            if manifest.num_brokers > 1:
                raise BackupDamaged(f"{backup} is of a run of {manifest.num_brokers} brokers: gspo 0.1.0 restores it")
            _require_files(manifest)
            return manifest
    except (OSError, ValueError, RecursionError) as error:
        raise BackupDamaged(f"{path} cannot be read: {error}; use another backup") from error
    raise BackupDamaged(f"{path} has format {found}, this release reads {FORMAT}: use the release that made it")


def _require_files(manifest: BackupManifest) -> None:
    require_names(manifest.files)
    for name in manifest.files:
        if not _KINDS.fullmatch(name):
            raise ForeignError(f"{name[:100]!r} is no file that `gspo backup` writes")
    for name in (LEDGER_FILE, SETTINGS_FILE):
        if name not in manifest.files:
            raise ForeignError(f"it lists no {name}")


def list_backups(destination: Path) -> list[tuple[Path, BackupManifest]]:
    """List complete backups in ``destination``, oldest first; ``destination`` may itself be one. Raises: BackupDamaged."""
    if (destination / MANIFEST).is_file():
        return [(destination, read_manifest(destination))]
    found = [(path.parent, read_manifest(path.parent)) for path in destination.glob(f"[0-9]*/{MANIFEST}")]
    return sorted(found, key=lambda each: (each[1].number, each[0]))

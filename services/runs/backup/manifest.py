"""The manifest of a backup: its files with their digests, and the batches that it can be restored to.

DESTINATION/2026-11-22T10-30-00Z/       one backup: a run directory, and
    backup.json                         this manifest, written last
DESTINATION/.partial-...                an interrupted backup: nothing reads it, and the next backup removes it
"""

from pathlib import Path
from typing import Final

import msgspec

from gspo_services.shared.runtime.errors import ServiceError

MANIFEST: Final = "backup.json"
FORMAT: Final = 1


class BackupDamaged(ServiceError):
    """A backup lacks a file, a file is not what was copied, or this release cannot read it. The text has the way out."""


class BackupFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a backup. ``mtime_ns``: the time of the run's file; if name, size and time match, it is not read again."""

    num_bytes: int
    sha256: str
    mtime_ns: int


class BackupManifest(msgspec.Struct, frozen=True, kw_only=True):
    """backup.json"""

    format: int
    name: str
    run_id: str
    source: str
    num_batches: int
    """Batches assembled."""
    positions: list[int]
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


def read_manifest(backup: Path) -> BackupManifest:
    """Raises: BackupDamaged, also for a backup of another release."""
    path = backup / MANIFEST
    try:
        content = path.read_bytes()
        # First: a backup of another release may lack fields, and is not damaged.
        found = msgspec.json.decode(content, type=_Format).format
        if found == FORMAT:
            manifest = msgspec.json.decode(content, type=BackupManifest)
            if manifest.num_brokers > 1:
                raise BackupDamaged(f"{backup} is of a run of {manifest.num_brokers} brokers: gspo 0.1.0 restores it")
            return manifest
    except (OSError, ValueError, RecursionError) as error:
        raise BackupDamaged(f"{path} cannot be read: {error}; use another backup") from error
    raise BackupDamaged(f"{path} has format {found}, this release reads {FORMAT}: use the release that made it")


def list_backups(destination: Path) -> list[tuple[Path, BackupManifest]]:
    """List complete backups in ``destination``, oldest first; ``destination`` may itself be one. Raises: BackupDamaged."""
    if (destination / MANIFEST).is_file():
        return [(destination, read_manifest(destination))]
    found = [(path.parent, read_manifest(path.parent)) for path in destination.glob(f"[0-9]*/{MANIFEST}")]
    return sorted(found, key=lambda each: (each[1].number, each[0]))

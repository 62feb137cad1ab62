"""Copies of a run: made while the run may be active, and restored as they were or at an earlier checkpoint."""

from gspo_services.runs.backup.backup import back_up
from gspo_services.runs.backup.manifest import BackupDamaged, BackupManifest, list_backups
from gspo_services.runs.backup.restore import restore

__all__ = ["BackupDamaged", "BackupManifest", "back_up", "list_backups", "restore"]

"""Copies of a run: made beside a live run, and put back as they were or as the run stood earlier."""

from gspo_services.runs.backup.backup import back_up
from gspo_services.runs.backup.manifest import BackupDamaged, BackupManifest, list_backups
from gspo_services.runs.backup.restore import restore

__all__ = ["BackupDamaged", "BackupManifest", "back_up", "list_backups", "restore"]

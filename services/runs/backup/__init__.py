"""Copies of a run: made beside a live run, and put back as they were or as the run stood earlier."""

from services.runs.backup.backup import back_up
from services.runs.backup.manifest import BackupDamaged, Manifest, list_backups
from services.runs.backup.restore import restore

__all__ = ["BackupDamaged", "Manifest", "back_up", "list_backups", "restore"]

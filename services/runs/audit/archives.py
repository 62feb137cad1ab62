"""Checks the archive's files, and reads the chunks of archived groups for the check of all trajectories."""

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gspo_services.broker.rows import ArchivedRow, ArchiveRow
from gspo_services.broker.store import ARCHIVE_DIRECTORY, LEDGER_FILE, Reader, StoreCorrupt, StoredChunk, held
from gspo_services.runs.audit.findings import Findings
from gspo_services.shared.runtime.foreign import ForeignError, ForeignTree

IN_PLAY: Final = """
SELECT a.group_id, g.status FROM archived a LEFT JOIN groups g ON g.group_id = a.group_id
WHERE g.status IS NULL OR g.status = 'open'
"""
"""A complete group may be: its batch was quarantined after it was archived, and requeued."""


class ArchiveAudit:
    """The archive as one snapshot of the ledger names it."""

    def __init__(self, findings: Findings, directory: Path, connection: sqlite3.Connection) -> None:
        self._findings = findings
        self._directory = directory / ARCHIVE_DIRECTORY
        self._connection = connection
        self._reader = Reader(directory / LEDGER_FILE, connection)
        self.unreadable: set[int] = set()
        """Archives that cannot be read: their trajectories are not checked one by one."""

    def check_files(self) -> None:
        """Check that each file exists with the bytes that were written. Raises: sqlite3.DatabaseError."""
        for group_id, status in self._connection.execute(IN_PLAY):
            self._findings.add("archived in play", f"group {group_id} is archived, but is {status or 'not there'}")
        for row in self._reader.rows(ArchiveRow, "ORDER BY archive"):
            path = self._directory / row.name
            try:
                found = ForeignTree(self._directory).sha256(row.name)
            except (OSError, ForeignError) as error:
                why = error.strerror if isinstance(error, OSError) else error
                self._unreadable(row, f"{path.name} cannot be read ({why})")
                continue
            if found != row.sha256:
                self._unreadable(row, f"{path.name} has SHA-256 {found[:16]}..., but {row.sha256[:16]}... was written")

    def _unreadable(self, row: ArchiveRow, text: str) -> None:
        self.unreadable.add(row.archive)
        self._findings.add("archive damaged", f"{text}: {held(row)}")

    def chunks(self, place: ArchivedRow, trajectory_id: int) -> Sequence[StoredChunk]:
        """Return an archived trajectory's chunks; none if its file cannot be read."""
        if place.archive in self.unreadable:
            return []
        try:
            return self._reader.archived_chunks(place, trajectory_id)
        except StoreCorrupt as error:
            self._findings.add("archive damaged", str(error))
            return []

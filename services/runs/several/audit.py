"""Audits the ledgers of several brokers, each by itself and as one run."""

import sqlite3
from collections.abc import Sequence
from pathlib import Path

from gspo_services.runs.audit import Audit, Findings, Rules, audit_ledger, read_checkpoints
from gspo_services.runs.several.across import SharedHistory, audit_ids, read_share
from gspo_services.runs.several.merging import merged


def audit_several(directory: Path, ledgers: Sequence[Path]) -> Audit:
    """See ``audit_run``, for the run in ``directory`` whose brokers have their ledgers in ``ledgers``. Raises: NoLedger."""
    # Before the snapshots: what a live run writes next would be newer than a snapshot taken before it.
    checkpoints = read_checkpoints(directory)
    readers = [ShareReader() for _ in ledgers]
    audits = [audit_ledger(each, checkpoints, reader) for each, reader in zip(ledgers, readers, strict=True)]
    return merged(directory, audits, [reader.history for reader in readers])


class ShareReader:
    """The ``BesideAudit`` of one broker's ledger."""

    def __init__(self) -> None:
        self.history: SharedHistory | None = None
        """What the ledger shares with the others; None: that cannot be read."""

    def check(self, connection: sqlite3.Connection, findings: Findings, rules: Rules) -> None:
        """Raises: sqlite3.DatabaseError."""
        audit_ids(connection, findings, rules)

    def read(self, connection: sqlite3.Connection) -> None:
        """Raises: sqlite3.DatabaseError."""
        self.history = read_share(connection)

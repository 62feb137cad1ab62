"""Checks that nothing acknowledged is missing, and that no row was changed on the disk."""

import json
import sqlite3
from pathlib import Path

from gspo_services.broker.store import (
    LEDGER_FILE,
    Evidence,
    Reader,
    StoreCorrupt,
    checked_columns,
    loss_of,
    loss_without_ledger,
    recorded,
    row_checksum,
    stale_mark,
)
from gspo_services.runs.audit.findings import Findings

MISSING = "acknowledged and missing"


def audit_without_ledger(findings: Findings, evidence: Evidence) -> None:
    """Report what a directory without a ledger shows of a lost one."""
    loss = loss_without_ledger(evidence)
    if loss:
        findings.add(MISSING, f"{LEDGER_FILE} does not exist: {loss}")


def audit_missing(findings: Findings, directory: Path, connection: sqlite3.Connection, evidence: Evidence) -> list[str]:
    """Compare the ledger with ``evidence``, which was read before it. Returns notes. Raises: sqlite3.DatabaseError."""
    reader = Reader(directory / LEDGER_FILE, connection)
    try:
        found = recorded(reader, evidence)
    except StoreCorrupt as error:
        findings.add("row was changed", str(error))
        return []
    for reason in loss_of(evidence, found).reasons:
        findings.add(MISSING, reason)
    (lines, batches) = connection.execute(
        "SELECT (SELECT count(*) FROM metrics_lines), (SELECT count(*) FROM batches)"
    ).fetchone()
    for what, there, counted in (
        ("lines of metrics", lines, found.newest.lines),
        ("batches", batches, found.newest.batches),
    ):
        if there != counted:
            findings.add(MISSING, f"the ledger has {there} {what}, but its last commit counted {counted}")
    note = stale_mark(evidence.mark, found)
    return [note] if note else []


def audit_losses(connection: sqlite3.Connection, findings: Findings) -> None:
    """Report what was lost, and accepted by a person. Raises: sqlite3.DatabaseError."""
    for number, line in connection.execute("SELECT loss, line FROM losses ORDER BY loss"):
        findings.add("lost, and accepted", f"loss {number}: {json.loads(line).get('text')}")


def audit_rows(connection: sqlite3.Connection, findings: Findings) -> None:
    """Check the checksum of every row; those of chunks are checked with their tokens. Raises: sqlite3.DatabaseError."""
    connection.create_function("checksum_of", -1, lambda table, *values: row_checksum(table, values), deterministic=True)
    for table, columns in checked_columns().items():
        names = ", ".join(columns)
        query = f"SELECT {names} FROM {table} WHERE checksum_of('{table}', {names}) IS NOT checksum"
        for values in connection.execute(query):
            text = ", ".join(f"{name} {value!r:.60}" for name, value in zip(columns, values, strict=True))
            findings.add("row was changed", f"{table}: not the row that was written: {text}")

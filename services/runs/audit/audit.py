"""Audits a run directory, of a live or an ended run: everything is read in one snapshot of the ledger."""

import sqlite3
from pathlib import Path

from services.broker.store import reading
from services.runs.audit.archives import ArchiveAudit
from services.runs.audit.findings import Audit, Findings, Rules
from services.runs.audit.groups import audit_groups, outcomes
from services.runs.audit.order import Order, audit_batches, audit_set_aside, audit_versions, read_order
from services.runs.audit.record import audit_checkpoints, audit_record, read_checkpoints
from services.runs.audit.tokens import TokenAudit, TokenCounts
from services.runs.audit.values import audit_values
from services.runtime.errors import ConfigurationError
from services.runtime.settings import read_run_settings


def audit_run(directory: Path) -> Audit:
    """Check everything that ``directory`` holds. Memory grows with the number of batches, not of trajectories.

    Raises: NoLedger when it is not a run directory.
    """
    # Before the snapshot: a live learner's next checkpoint would be newer than a snapshot taken before it.
    checkpoints = read_checkpoints(directory)
    findings = Findings()
    rules, notes = _rules(directory)
    order = Order(batch_versions={}, trained_batches={}, trained=[], checkpointed=0)
    counts = TokenCounts(num_chunks=0, num_resumed=0)
    found = []
    run_id = ""
    with reading(directory) as connection:
        try:
            run_id = str(connection.execute("SELECT max(value) FROM meta WHERE key = 'run_id'").fetchone()[0])
            _audit_database(connection, findings)
            if not audit_values(connection, findings):
                raise sqlite3.DatabaseError("its rows hold values that no broker writes")
            order = read_order(connection)
            found = outcomes(connection)
            audit_groups(connection, findings, rules)
            audit_batches(connection, findings, rules, order)
            audit_set_aside(connection, findings, order)
            notes += audit_versions(findings, order)
            notes += audit_checkpoints(findings, order, checkpoints)
            notes += audit_record(connection, findings, directory)
            archives = ArchiveAudit(findings, directory, connection)
            archives.check_files()
            counts = TokenAudit(findings, rules, order.batch_versions, order.versions).run(connection, archives)
        # UnicodeDecodeError: SQLite's own message quotes the broken bytes.
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            findings.add("database damaged", f"it cannot be read to its end: {error}")
    trained = [batch for batch, version in order.trained if (batch, version) not in order.skipped]
    return Audit(
        directory=directory,
        run_id=run_id,
        outcomes=found,
        num_batches=len(order.batch_versions),
        num_trained_batches=len(set(trained)),
        num_trained_again=len(trained) - len(set(trained)),
        num_set_aside=len(order.set_aside),
        num_resumed=counts.num_resumed,
        num_versions=len(order.trained_batches),
        num_chunks=counts.num_chunks,
        findings=findings,
        notes=notes,
    )


def _rules(directory: Path) -> tuple[Rules, list[str]]:
    try:
        settings = read_run_settings(directory)
    except ConfigurationError as error:
        return Rules(), [f"the sizes of groups and batches and the lag are not checked: {error}"]
    batch = settings.batch
    rules = Rules(group_size=batch.group_size, groups_per_batch=batch.groups_per_batch, max_lag=batch.max_lag)
    return rules, []


def _audit_database(connection: sqlite3.Connection, findings: Findings) -> None:
    """SQLite's own check of its pages, indices and rows."""
    for (text,) in connection.execute("PRAGMA integrity_check"):
        if text != "ok":
            findings.add("database damaged", text)

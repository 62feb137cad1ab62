"""Audits a ledger, of a live or an ended run: everything is read in one snapshot of it."""

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gspo_services.broker.store import (
    LEDGER_FILE,
    MARK_FILE,
    Evidence,
    NoLedger,
    OtherSchema,
    ReaderGaveWay,
    StoreCorrupt,
    has_content,
    read_evidence,
    reading,
)
from gspo_services.runs.audit.additions import audit_additions
from gspo_services.runs.audit.archives import ArchiveAudit
from gspo_services.runs.audit.filtered import audit_filtered
from gspo_services.runs.audit.findings import Audit, Findings, Outcome, Rules
from gspo_services.runs.audit.groups import audit_groups
from gspo_services.runs.audit.groups import outcomes as read_outcomes
from gspo_services.runs.audit.metrics_lines import Checkpoint, audit_checkpoints, audit_metrics_lines, read_checkpoints
from gspo_services.runs.audit.missing import audit_losses, audit_missing, audit_rows, audit_without_ledger
from gspo_services.runs.audit.order import Order, audit_batches, audit_quarantine, audit_versions, read_order
from gspo_services.runs.audit.tokens import TokenAudit, TokenCounts
from gspo_services.runs.audit.values import audit_values
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import read_run_settings

NO_ORDER: Final = Order(batch_versions={}, trained_batches={}, trained=[], checkpointed=0)
NO_TOKENS: Final = TokenCounts(num_chunks=0, num_resumed=0)


def audit_run(directory: Path) -> Audit:
    """Check everything that ``directory`` holds. Memory grows with the number of batches, not of trajectories.

    Raises: NoLedger when it has no ledger of this release, nor anything that is left of one.
    """
    # Before the snapshot: what a live run writes next would be newer than a snapshot taken before it.
    checkpoints = read_checkpoints(directory)
    evidence = read_evidence(directory, directory / LEDGER_FILE)
    findings = Findings()
    if not has_content(directory / LEDGER_FILE):
        audit_without_ledger(findings, evidence)
        if findings.counts:
            return _result(directory, findings)
    try:
        return _audit_rows(directory, findings, evidence, checkpoints)
    except (OtherSchema, ReaderGaveWay):
        raise
    except NoLedger as error:
        if evidence.mark is None:
            raise
        findings.add("database damaged", f"{error}; {MARK_FILE} says that it was a ledger")
        return _result(directory, findings)


def _audit_rows(directory: Path, findings: Findings, evidence: Evidence, checkpoints: list[Checkpoint]) -> Audit:
    rules, notes = _rules(directory)
    order, counts = NO_ORDER, NO_TOKENS
    found: list[Outcome] = []
    run_id = ""
    with reading(directory) as connection:
        try:
            run_id = str(connection.execute("SELECT max(value) FROM meta WHERE key = 'run_id'").fetchone()[0])
            _audit_database(connection, findings)
            if not audit_values(connection, findings):
                raise sqlite3.DatabaseError("its rows hold values that no broker writes")
            audit_rows(connection, findings)
            notes += audit_missing(findings, directory, connection, evidence)
            audit_losses(connection, findings)
            order = read_order(connection)
            found = read_outcomes(connection)
            audit_groups(connection, findings, rules)
            audit_filtered(connection, findings)
            audit_additions(connection, findings, directory)
            audit_batches(connection, findings, rules, order)
            audit_quarantine(connection, findings, order)
            notes += audit_versions(findings, order)
            notes += audit_checkpoints(findings, order, checkpoints)
            notes += audit_metrics_lines(connection, findings, directory)
            archives = ArchiveAudit(findings, directory, connection)
            archives.check_files()
            counts = TokenAudit(findings, rules, order.batch_versions, order.versions).run(connection, archives)
        # UnicodeDecodeError: SQLite's own message quotes the broken bytes.
        except (sqlite3.DatabaseError, StoreCorrupt, UnicodeDecodeError) as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT:
                raise
            findings.add("database damaged", f"it cannot be read to its end: {error}")
    return _result(directory, findings, run_id=run_id, outcomes=found, order=order, counts=counts, notes=notes)


def _result(
    directory: Path,
    findings: Findings,
    *,
    run_id: str = "",
    outcomes: Sequence[Outcome] = (),
    order: Order = NO_ORDER,
    counts: TokenCounts = NO_TOKENS,
    notes: Sequence[str] = (),
) -> Audit:
    trained = [batch for batch, version in order.trained if (batch, version) not in order.skipped]
    return Audit(
        directory=directory,
        run_id=run_id,
        outcomes=list(outcomes),
        num_batches=len(order.batch_versions),
        num_trained_batches=len(set(trained)),
        num_trained_again=len(trained) - len(set(trained)),
        num_quarantined=len(order.quarantined),
        num_resumed=counts.num_resumed,
        num_versions=len(order.trained_batches),
        num_chunks=counts.num_chunks,
        findings=findings,
        notes=list(notes),
    )


def _rules(directory: Path) -> tuple[Rules, list[str]]:
    try:
        settings = read_run_settings(directory)
    except ConfigurationError as error:
        return Rules(), [f"the sizes of groups and batches and the lag are not checked: {error}"]
    rules = Rules(
        group_size=settings.batch.group_size,
        groups_per_batch=settings.batch.groups_per_batch,
        max_lag=settings.batch.max_lag,
        grades_groups=bool(settings.reward.group),
    )
    return rules, []


def _audit_database(connection: sqlite3.Connection, findings: Findings) -> None:
    """Run SQLite's own check of its pages, indices and rows."""
    for (text,) in connection.execute("PRAGMA integrity_check"):
        if text != "ok":
            findings.add("database damaged", text)

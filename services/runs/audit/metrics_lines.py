"""Checks metrics.jsonl and the learner's checkpoints against the ledger."""

import json
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from gspo_protocol.messages import Count, Version
from gspo_services.broker.metrics_file import METRICS_FILE
from gspo_services.runs.audit.findings import Findings
from gspo_services.runs.audit.order import Order
from gspo_services.runs.metrics import MetricsFollower
from gspo_services.shared.runtime.foreign import ForeignTree

UNRECORDED_TRAININGS: Final = """
SELECT batch, policy_version FROM trained EXCEPT
SELECT json_extract(line, '$.batch'), json_extract(line, '$.policy_version') FROM metrics_lines
WHERE json_extract(line, '$.event') IN ('batch', 'batch_skipped')
"""
UNRECORDED_ASIDE: Final = """
SELECT batch FROM quarantined EXCEPT
SELECT json_extract(line, '$.batch') FROM metrics_lines WHERE json_extract(line, '$.event') = 'quarantined'
"""
UNRECORDED_DROPS: Final = """
SELECT group_id FROM groups WHERE status = 'dropped' EXCEPT
SELECT json_extract(line, '$.group_id') FROM metrics_lines WHERE json_extract(line, '$.event') = 'dropped'
"""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint's own metadata."""

    name: str
    policy_version: int
    batch_position: int


class _State(msgspec.Struct):
    policy_version: Version
    batch_position: Count


class _Metadata(msgspec.Struct):
    """The fields of checkpoint.json that an audit reads."""

    state: _State


def read_checkpoints(directory: Path) -> list[Checkpoint]:
    """Read the run's complete checkpoints, oldest first. Those removed meanwhile, or unreadable, are omitted."""
    found = []
    for path in sorted(directory.glob("checkpoints/version-*/checkpoint.json")):
        try:
            state = msgspec.json.decode(ForeignTree(path.parent).read(path.name), type=_Metadata).state
        except (OSError, ValueError, RecursionError):
            continue
        name = path.parent.name
        found.append(Checkpoint(name=name, policy_version=state.policy_version, batch_position=state.batch_position))
    return found


def audit_checkpoints(findings: Findings, order: Order, checkpoints: list[Checkpoint]) -> list[str]:
    """Compare ``checkpoints``, which were read before the ledger's snapshot, with it. Returns notes."""
    assembled = max(order.batch_versions, default=-1) + 1
    newest = max(order.versions, default=0)
    for checkpoint in checkpoints:
        where = f"checkpoint {checkpoint.name}"
        if checkpoint.batch_position > assembled:
            text = f"{where} covers {checkpoint.batch_position} batches, but only {assembled} were assembled"
            findings.add("checkpoint of another run", text)
        trained_on = order.trained_batches.get(checkpoint.policy_version)
        if trained_on is None and 0 < checkpoint.policy_version < newest:
            findings.add("checkpoint of another run", f"{where} holds a version that was never published")
        if trained_on not in (None, checkpoint.batch_position):
            text = f"{where} covers {checkpoint.batch_position} batches, but its version was trained on {trained_on}"
            findings.add("checkpoint of another run", text)
    if not order.checkpointed:
        return []
    if not checkpoints:
        return [f"{order.checkpointed} batches are covered by a checkpoint that is not in this directory"]
    covered = max(checkpoint.batch_position for checkpoint in checkpoints)
    if covered < order.checkpointed:
        text = f"{order.checkpointed} batches are covered by a checkpoint, but the newest one there covers {covered}"
        findings.add("checkpoint missing", text)
    return []


def audit_metrics_lines(connection: sqlite3.Connection, findings: Findings, directory: Path) -> list[str]:
    """Check that each training, drop and quarantined batch has a line in the store, and that metrics.jsonl equals it.

    Returns notes. Raises: sqlite3.DatabaseError.
    """
    for batch, version in connection.execute(UNRECORDED_TRAININGS):
        findings.add("no metrics line", f"the training of batch {batch} into version {version}")
    for (group_id,) in connection.execute(UNRECORDED_DROPS):
        findings.add("no metrics line", f"the drop of group {group_id}")
    for (batch,) in connection.execute(UNRECORDED_ASIDE):
        findings.add("no metrics line", f"batch {batch} was quarantined")
    path = directory / METRICS_FILE
    last = connection.execute("SELECT coalesce(max(number), 0) FROM metrics_lines").fetchone()[0]
    if not path.exists():
        return [f"{path.name} is not there; the broker writes it again from the ledger"] if last else []
    compared = _audit_file(connection, findings, path)
    if compared < last:
        return [f"{path.name} is {last - compared} lines behind the ledger: the broker brings it up to date when it runs"]
    return []


def _audit_file(connection: sqlite3.Connection, findings: Findings, path: Path) -> int:
    """Compare the lines with the ledger's by number, up to the end of its snapshot. Returns the last number compared."""
    follower = MetricsFollower(path)
    lines = follower.rows()
    line = next(lines, None)
    compared = 0
    for number, text in connection.execute("SELECT number, line FROM metrics_lines ORDER BY number"):
        if line is None:
            break
        compared = number
        if line != {"line": number, **json.loads(text)}:
            findings.add("metrics.jsonl differs", f"{path.name}: line {number} is missing, or is not the ledger's")
        if line["line"] <= number:
            line = next(lines, None)
    if follower.damage is not None:
        findings.add("metrics.jsonl differs", str(follower.damage))
    return compared

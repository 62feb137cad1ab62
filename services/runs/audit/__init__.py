"""Proves from a run's files that every trajectory was trained exactly once, or dropped for a stated reason."""

from gspo_services.runs.audit.audit import BesideAudit, audit_ledger
from gspo_services.runs.audit.findings import KEPT, Audit, Findings, Outcome, Rules
from gspo_services.runs.audit.metrics_lines import Checkpoint, read_checkpoints

__all__ = [
    "KEPT",
    "Audit",
    "BesideAudit",
    "Checkpoint",
    "Findings",
    "Outcome",
    "Rules",
    "audit_ledger",
    "read_checkpoints",
]

"""Proves from a run's files that every trajectory was trained exactly once, or dropped for a stated reason."""

from gspo_services.runs.audit.audit import audit_run
from gspo_services.runs.audit.findings import Audit, Findings, Outcome
from gspo_services.runs.audit.metrics_lines import Checkpoint, read_checkpoints

__all__ = [
    "Audit",
    "Checkpoint",
    "Findings",
    "Outcome",
    "audit_run",
    "read_checkpoints",
]

"""Batches that end their learner: how often each did, and the groups that are in quarantine for it."""

from gspo_services.broker.ledger.quarantine.failures import REPORTED_MOST, SILENT_MOST, Failures
from gspo_services.broker.ledger.quarantine.quarantine import IN_A_ROW, Quarantine, Shelved, requeued_line

__all__ = ["IN_A_ROW", "REPORTED_MOST", "SILENT_MOST", "Failures", "Quarantine", "Shelved", "requeued_line"]

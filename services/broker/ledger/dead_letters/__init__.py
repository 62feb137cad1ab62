"""Batches that end their learner: how often each did, and the groups that were set aside for it."""

from gspo_services.broker.ledger.dead_letters.failures import REPORTED_MOST, SILENT_MOST, Failures
from gspo_services.broker.ledger.dead_letters.letters import IN_A_ROW, DeadLetters, Shelved, released_line

__all__ = ["IN_A_ROW", "REPORTED_MOST", "SILENT_MOST", "DeadLetters", "Failures", "Shelved", "released_line"]

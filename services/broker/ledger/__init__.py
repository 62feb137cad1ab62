"""The broker's decisions, without input or output: events in, actions out."""

from gspo_services.broker.ledger.actions import (
    Action,
    Announce,
    AppendChunk,
    AppendChunks,
    DeliverBatch,
    DeliverParts,
    GrantLease,
    Note,
    Offence,
    Reply,
    Reshelve,
    Save,
    SessionKey,
    WriteMetrics,
)
from gspo_services.broker.ledger.batch_order import REMEMBERED, batch_stats
from gspo_services.broker.ledger.config import LedgerConfig, Schedules
from gspo_services.broker.ledger.evaluations import SetTerms
from gspo_services.broker.ledger.extensions import MOST_BEHIND, extended_row
from gspo_services.broker.ledger.fencing import Owner
from gspo_services.broker.ledger.fleet import STATES
from gspo_services.broker.ledger.intake import TokenFacts, check_finish, grown_row, growth, journal_entry
from gspo_services.broker.ledger.ledger import ALLOWED, UNKNOWN_SESSION, Ledger
from gspo_services.broker.ledger.lengths import DIFFICULTIES, sampling_line
from gspo_services.broker.ledger.quarantine import Quarantine, requeued_line
from gspo_services.broker.ledger.sampling import AddedTasks, SamplingRules, SourceShare, trajectory_seed
from gspo_services.broker.ledger.status import groups_by_state

__all__ = [
    "ALLOWED",
    "DIFFICULTIES",
    "MOST_BEHIND",
    "REMEMBERED",
    "STATES",
    "UNKNOWN_SESSION",
    "Action",
    "AddedTasks",
    "Announce",
    "AppendChunk",
    "AppendChunks",
    "DeliverBatch",
    "DeliverParts",
    "GrantLease",
    "Ledger",
    "LedgerConfig",
    "Note",
    "Offence",
    "Owner",
    "Quarantine",
    "Reply",
    "Reshelve",
    "SamplingRules",
    "Save",
    "Schedules",
    "SessionKey",
    "SetTerms",
    "SourceShare",
    "TokenFacts",
    "WriteMetrics",
    "batch_stats",
    "check_finish",
    "extended_row",
    "groups_by_state",
    "grown_row",
    "growth",
    "journal_entry",
    "requeued_line",
    "sampling_line",
    "trajectory_seed",
]

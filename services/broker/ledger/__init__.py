"""The broker's decisions, without input or output: events in, actions out."""

from services.broker.ledger.actions import (
    Action,
    Announce,
    AppendChunk,
    DeliverBatch,
    GrantLease,
    Note,
    Offence,
    Reply,
    Reshelve,
    Save,
    SessionKey,
    WriteMetrics,
)
from services.broker.ledger.batch_order import REMEMBERED, batch_stats
from services.broker.ledger.dead_letters import DeadLetters, released_line
from services.broker.ledger.fencing import Owner
from services.broker.ledger.fleet import STATES
from services.broker.ledger.intake import TokenFacts, check_finish, grown_row, growth, journal_entry
from services.broker.ledger.ledger import ALLOWED, UNKNOWN_SESSION, Ledger
from services.broker.ledger.state import LedgerConfig
from services.broker.ledger.status import groups_by_state
from services.broker.ledger.task_order import trajectory_seed

__all__ = [
    "ALLOWED",
    "REMEMBERED",
    "STATES",
    "UNKNOWN_SESSION",
    "Action",
    "Announce",
    "AppendChunk",
    "DeadLetters",
    "DeliverBatch",
    "GrantLease",
    "Ledger",
    "LedgerConfig",
    "Note",
    "Offence",
    "Owner",
    "Reply",
    "Reshelve",
    "Save",
    "SessionKey",
    "TokenFacts",
    "WriteMetrics",
    "batch_stats",
    "check_finish",
    "groups_by_state",
    "grown_row",
    "growth",
    "journal_entry",
    "released_line",
    "trajectory_seed",
]

"""A run's log in PostgreSQL, and who may write it. Imported only with broker.database set: it needs psycopg."""

from gspo_services.broker.standby.database.checks import ServerFacts, asynchronous, refusal, waiting
from gspo_services.broker.standby.database.commit_wait import CommitState, doubt_of
from gspo_services.broker.standby.database.connection import Database
from gspo_services.broker.standby.database.errors import DatabaseRefused, LeadershipLost
from gspo_services.broker.standby.database.leadership import LeaderRow, claim, leader_of, release
from gspo_services.broker.standby.database.log import DatabaseLog
from gspo_services.broker.standby.database.tables import LoggedRun, open_log

__all__ = [
    "CommitState",
    "Database",
    "DatabaseLog",
    "DatabaseRefused",
    "LeaderRow",
    "LeadershipLost",
    "LoggedRun",
    "ServerFacts",
    "asynchronous",
    "claim",
    "doubt_of",
    "leader_of",
    "open_log",
    "refusal",
    "release",
    "waiting",
]

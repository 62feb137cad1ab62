"""Whether a commit has waited until a second machine had it.

A server's settings change while a connection is open. The commit sets for itself what it may, and what it may not set is
looked at before and after it.
"""

from dataclasses import dataclass
from typing import Any, Final

import psycopg

from gspo_services.broker.standby.database.checks import without_crash_safety, without_standbys

LOCK_MS: Final = 3000
"""A statement that waits behind one of ours, which hangs, gives up: they must not heap up in the server."""
LOOKS: Final = 20
LOOK_S: Final = 0.05
STATE: Final = """
SELECT current_setting('synchronous_standby_names'), current_setting('fsync') = 'on',
    current_setting('full_page_writes') = 'on', pg_conf_load_time()::text, pg_current_wal_flush_lsn()::text
"""
PREPARE: Final = f"""{STATE.rstrip()}, set_config('lock_timeout', '{LOCK_MS}', true),
    CASE WHEN %s AND current_setting('synchronous_commit') <> 'remote_apply'
        THEN set_config('synchronous_commit', 'on', true) END
"""
"""Set for one transaction, because a pooler gives the next one another session."""
HAS: Final = """
SELECT coalesce(max(flush_lsn) >= %s::pg_lsn, false), count(*) FILTER (WHERE sync_state IS NULL),
    count(*) FILTER (WHERE sync_state IN ('sync', 'quorum'))
FROM pg_stat_replication WHERE sync_state IS NULL OR sync_state IN ('sync', 'quorum')
"""


@dataclass(frozen=True)
class CommitState:
    """What a commit rests on and cannot set; in the order of STATE."""

    standby_names: str
    fsync: bool
    full_page_writes: bool
    read_at: str
    """When the server read its settings."""
    flushed: str
    """How far its log is on its own disk."""


def doubt_of(before: CommitState, after: CommitState) -> str:
    """Why a commit between the two may be on one machine only; empty if nothing says so."""
    for state in (before, after):
        if not (state.fsync and state.full_page_writes):
            return without_crash_safety(fsync=state.fsync)
        if not state.standby_names.strip():
            return without_standbys()
    # Emptied and set again, they have ended a wait, and no warning says so.
    return "" if before.read_at == after.read_at else "the server read its settings again meanwhile"


def unproven(connection: psycopg.Connection[Any], state: CommitState) -> str:
    """Whether a standby confirms a commit that came before ``state``, as the server sees it; empty when one does.

    Looked at once for each reading of the settings: a server begins to wait some time after a setting says so. A user who
    may not see its standbys has to believe it.
    """
    for _ in range(LOOKS):
        ((has, num_hidden, num_synchronous),) = connection.execute(HAS.encode(), (state.flushed,)).fetchall()
        if has or (num_hidden and not num_synchronous):
            return ""
        connection.execute(b"SELECT pg_sleep(%s)", (LOOK_S,))
    return "no synchronous standby has it yet (pg_stat_replication)"

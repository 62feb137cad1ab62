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
WAITING_LEVELS: Final = ("on", "remote_apply")
"""Of synchronous_commit: the standby has the commit on its disk. remote_write leaves it in its memory."""
LOOKS: Final = 20
LOOK_S: Final = 0.05
STATE: Final = """
SELECT current_setting('synchronous_standby_names'), current_setting('fsync') = 'on',
    current_setting('full_page_writes') = 'on', pg_conf_load_time()::text, pg_current_wal_flush_lsn()::text
"""
PREPARE: Final = f"""{STATE.rstrip()}, set_config('lock_timeout', '{LOCK_MS}', true),
    CASE WHEN current_setting('synchronous_commit') = 'remote_apply' THEN 'remote_apply'
        WHEN %s THEN set_config('synchronous_commit', 'on', true) ELSE current_setting('synchronous_commit') END
"""
"""Set for one transaction, because a pooler gives the next one another session."""
_HAS: Final = "SELECT coalesce(max(flush_lsn) >= {}, false) FROM pg_stat_replication WHERE sync_state IN ('sync', 'quorum')"
"""Whether a synchronous standby has the log on its disk up to there; false also for a user who may not see any."""
AFTER: Final = f"{STATE.rstrip()}, ({_HAS.format('pg_current_wal_flush_lsn()')})"
HAS: Final = _HAS.format("%s::pg_lsn")


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


def unproven(connection: psycopg.Connection[Any], state: CommitState, *, proven: bool) -> str:
    """Whether a standby confirms a commit that came before ``state``, as the server sees it; empty when one does.

    Nothing else shows it: a wait that was cancelled ends as one that was not, but for a warning, which the settings of a
    role, a database or a session may hold back. ``proven``: whether ``state`` came with it. Others' writes are in the log,
    too, hence several looks.
    """
    for _ in range(LOOKS):
        if proven:
            return ""
        connection.execute(b"SELECT pg_sleep(%s)", (LOOK_S,))
        ((proven,),) = connection.execute(HAS.encode(), (state.flushed,)).fetchall()
    return "no synchronous standby has it yet (pg_stat_replication)"

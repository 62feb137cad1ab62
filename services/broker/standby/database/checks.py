"""Whether a server keeps what it confirms. Pure.

It is looked at with each new connection: a failover may lead to another server. ``commit_wait`` looks at each commit.
"""

from dataclasses import dataclass
from typing import Final

from gspo_services.broker.standby.database.errors import SETTING

OLDEST_VERSION: Final = 130000
ALLOW: Final = "broker.allow_asynchronous_database = true accepts that"
FACTS: Final = """
SELECT current_setting('server_version_num')::int, current_setting('server_version'), pg_is_in_recovery(),
    current_setting('transaction_read_only') = 'on', current_setting('fsync') = 'on',
    current_setting('full_page_writes') = 'on', current_setting('synchronous_standby_names'),
    (SELECT count(*) FROM pg_stat_replication WHERE sync_state IN ('sync', 'quorum') AND state = 'streaming'),
    pg_has_role(current_user, 'pg_read_all_stats', 'USAGE'),
    has_database_privilege(current_database(), 'CREATE') OR to_regnamespace(quote_ident(%s)) IS NOT NULL, current_user::text
"""


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """One server, as it describes itself; in the order of FACTS."""

    version: int
    version_text: str
    in_recovery: bool
    read_only: bool
    fsync: bool
    full_page_writes: bool
    standby_names: str
    """synchronous_standby_names."""
    num_synchronous: int
    """Synchronous standbys that are connected."""
    sees_standbys: bool
    """Whether the user may see the state of standbys."""
    may_create: bool
    """Whether the user may make the schema, or it is there."""
    user: str


def refusal(facts: ServerFacts, *, allow_asynchronous: bool) -> str:
    """Why the server cannot be used until a person changes something; empty when it can."""
    if facts.version < OLDEST_VERSION:
        return f"the server is PostgreSQL {facts.version_text}, {OLDEST_VERSION // 10000} or newer needed: upgrade it"
    if not facts.may_create:
        return (
            f"user {facts.user} may not make a schema in it: GRANT CREATE ON DATABASE ... TO {facts.user}, or make the "
            "schema and give it to this user"
        )
    if allow_asynchronous:
        return ""
    if not facts.sees_standbys:
        return (
            f"user {facts.user} may not see its standbys (pg_stat_replication), and nothing else shows that a commit is on "
            f"a second machine: GRANT pg_read_all_stats TO {facts.user}; {ALLOW}"
        )
    return asynchronous(facts)


def asynchronous(facts: ServerFacts) -> str:
    """Why what the server confirms could be lost with it; empty when two machines have it."""
    if not (facts.fsync and facts.full_page_writes):
        return without_crash_safety(fsync=facts.fsync)
    return without_standbys() if not facts.standby_names.strip() else ""


def without_crash_safety(*, fsync: bool) -> str:
    """What is said of a server whose files a crash can break. ``fsync``: whether that is on."""
    name = "full_page_writes" if fsync else "fsync"
    return f"its {name} is off: a crash of its machine loses what it confirmed. Set {name} = on; {ALLOW}"


def without_standbys() -> str:
    """What is said of a server that waits for no other one."""
    return (
        "its synchronous_standby_names is empty: what it confirms is on its own disk alone, and a failover loses the last "
        f"commits. Set synchronous_standby_names = 'ANY 1 (*)' with a standby connected; {ALLOW}"
    )


def waiting(facts: ServerFacts, *, allow_asynchronous: bool) -> str:
    """Why the server cannot be used now, which may pass by itself, as during a failover; empty when it can."""
    if facts.in_recovery or facts.read_only:
        what = "a standby (in recovery)" if facts.in_recovery else "read-only (default_transaction_read_only)"
        return f"the server is {what}: name all servers in {SETTING}, with target_session_attrs=read-write, or promote it"
    waits = facts.standby_names.strip() and not allow_asynchronous
    if waits and facts.sees_standbys and not facts.num_synchronous:
        return (
            f"no synchronous standby is connected (synchronous_standby_names is {facts.standby_names!r}): commits would "
            "wait for one. Start a standby of that name again"
        )
    return ""

"""What PostgreSQL says, in our words: who can help, and how."""

from collections.abc import Mapping
from typing import Final

from gspo_services.shared.runtime.errors import ConfigurationError, ServiceError

SETTING: Final = "broker.database"
AWAY: Final = "start it, or let its failover end; this broker goes on by itself"
WAYS_OUT: Final[Mapping[str, str]] = {
    "53100": "free space on its disk",
    "53200": "give it more memory",
    "53300": "raise its max_connections, or close other connections",
    "25006": f"it is read-only: name all servers in {SETTING}, with target_session_attrs=read-write",
    "55P03": "an earlier commit still waits there, probably for a synchronous standby: start one again",
    "57014": "somebody cancels its statements",
}
"""By SQLSTATE; all others: AWAY."""
NEEDS_A_PERSON: Final = (
    "password authentication failed", "no password supplied", "no pg_hba.conf entry", "does not exist",
    "is not permitted to log in", "invalid port number", "authentication failed", "certificate",
    "transaction blocks not allowed",
)  # fmt: skip
"""Parts of refusals that no waiting changes, of a server or of a pooler. libpq gives no SQLSTATE for these."""
UNREADABLE: Final = (
    f"{SETTING} cannot be read as a connection string of PostgreSQL (it is not shown: it may hold a password); write "
    "postgresql://user@host:5432/name, or host=... dbname=... user=..."
)


class DatabaseRefused(ConfigurationError):
    """The database cannot be used as it is, and waiting does not help. The text says what to change."""


class LeadershipLost(ServiceError):
    """Another broker leads the run. Started again, this one is its standby."""


def way_out(sqlstate: str | None) -> str:
    """What a person can do about an error."""
    return WAYS_OUT.get(sqlstate or "", AWAY)


def needs_a_person(text: str) -> bool:
    """Whether a refusal is for good."""
    return any(part in text for part in NEEDS_A_PERSON)

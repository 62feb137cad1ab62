"""Sessions: a session is one life of a process, and its name is a secret between the process and the other end.

Without keys, whoever knows a session can speak for it. So nobody can guess one, and none is shown: texts, logs and statuses
show its tag, from which it cannot be computed.
"""

import hashlib
import secrets
from typing import Final

SESSION_BYTES: Final = 16
TAG_BYTES: Final = 4


def new_session() -> str:
    """Make a session id that cannot be guessed: 128 random bits, hexadecimal."""
    return secrets.token_hex(SESSION_BYTES)


def session_towards(session: str, other_end: str) -> str:
    """Derive the session for one of many peers, so that none can impersonate the process to another."""
    return hashlib.blake2b(f"{session}\0{other_end}".encode(), digest_size=SESSION_BYTES).hexdigest()


def session_tag(session: str) -> str:
    """Eight characters that stand for a session where people read them."""
    return hashlib.blake2b(session.encode(), digest_size=TAG_BYTES).hexdigest()


def connection_identity(peer: str, session: str, number: int = 0) -> str:
    """Name a process's connection; see services/shared/net/peer.py. ``number``: connections that it gave up before."""
    return f"{peer}/{session}#{number}" if number else f"{peer}/{session}"


def belongs(identity: bytes, peer: str, session: str) -> bool:
    """Return whether the connection with this identity belongs to the session."""
    own = connection_identity(peer, session).encode()
    return identity == own or identity.startswith(own + b"#")


def first_identity(identity: bytes) -> bytes:
    """Return the identity of a session's first connection: the same for all of its connections."""
    owner, slash, session = identity.rpartition(b"/")
    return owner + slash + session.partition(b"#")[0]


def shown_identity(identity: bytes) -> str:
    """Return a connection's identity with the tag instead of the session."""
    peer, slash, session = identity.decode(errors="replace").rpartition("/")
    session, mark, number = session.partition("#")
    return f"{peer}/{session_tag(session)}{mark}{number}" if slash else f"{session}{mark}{number}"

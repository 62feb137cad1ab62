"""ZeroMQ channels: sockets, handshake, redelivery and keys."""

from services.runtime.net.authenticator import AUTHENTICATOR_REASONS, Authenticator, AuthenticatorCounters
from services.runtime.net.channel import Incoming, RouterChannel
from services.runtime.net.fair_queue import FairQueue
from services.runtime.net.peer import UNKNOWN_SESSION, Delivered, PeerClient
from services.runtime.net.ports import held_port
from services.runtime.net.security import KEY_ROLES, PLAINTEXT, KeyFileError, Security, key_role, write_key_pair

__all__ = [
    "AUTHENTICATOR_REASONS",
    "KEY_ROLES",
    "PLAINTEXT",
    "UNKNOWN_SESSION",
    "Authenticator",
    "AuthenticatorCounters",
    "Delivered",
    "FairQueue",
    "Incoming",
    "KeyFileError",
    "PeerClient",
    "RouterChannel",
    "Security",
    "held_port",
    "key_role",
    "write_key_pair",
]

"""ZeroMQ channels: sockets, handshake, redelivery and keys."""

from gspo_services.shared.net.authenticator import AUTHENTICATOR_REASONS, Authenticator, AuthenticatorCounters
from gspo_services.shared.net.channel import Incoming, RouterChannel
from gspo_services.shared.net.fair_queue import FairQueue
from gspo_services.shared.net.peer import UNKNOWN_SESSION, Delivered, PeerClient
from gspo_services.shared.net.ports import held_port
from gspo_services.shared.net.security import KEY_ROLES, PLAINTEXT, KeyFileError, Security, key_role, write_key_pair

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

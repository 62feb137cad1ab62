"""Messages of every connection: handshake, refusal, acknowledgement."""

from typing import Annotated

import msgspec
from msgspec import Meta

from gspo_protocol import limits
from gspo_protocol.messages.base import (
    Count,
    Message,
    Name,
    Reason,
    Role,
    Version,
)


class LedgerCommit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A commit of a broker's ledger. Ledgers that have the same one have the same history up to it."""

    run_id: Name
    number: Count
    digest: Name


# Hello, Welcome and Refused ignore fields that they do not know, and keep those that they have: so peers of neighbouring
# releases can tell each other that their releases differ, and which one is older.
class Hello(Message, frozen=True, tag="hello", forbid_unknown_fields=False):
    """Any peer -> broker or weight server: the first message of each connection, and again after a reconnect.

    A ``session`` is one life of a process: a new one ends the leases of the peer's former life.
    ``first_seq`` is the oldest sequence number that the sender has not seen acknowledged.
    ``fingerprint``: that of the sender's settings, which the run must share; empty: it is not checked.
    ``commit``: the newest one that the sender was told of, by this broker or the one that it takes it for. A ledger without
    it is a copy that went its own way, and its broker refuses the sender.
    """

    protocol_version: Count
    role: Role
    peer: Name
    session: Name
    first_seq: Count = 0
    fingerprint: Annotated[str, Meta(max_length=limits.MAX_NAME_CHARS)] = ""
    commit: LedgerCommit | None = None


class Goodbye(Message, frozen=True, tag="goodbye"):
    """Any peer -> broker or weight server, once: this session ends in order, so that nothing waits for it. A process that is
    killed says nothing, and its place and its leases lapse.
    """

    reason: Reason = ""


Session = Annotated[str, Meta(max_length=limits.MAX_NAME_CHARS)]
"""The life of the peer that a message is for: another life with that name, which has taken over the connection, ignores it.
Empty: for the peer that has the connection."""


class Welcome(Message, frozen=True, tag="welcome", forbid_unknown_fields=False):
    """Broker or weight server -> peer: the answer to Hello."""

    protocol_version: Count
    run_id: Name
    policy_version: Version
    """The newest published version; 0 when nothing was published yet. Other weights never get its number."""
    trained_batches: Count = 0
    """Number of batches that the newest version was trained on (for the learner)."""
    weights_digest: Annotated[str, Meta(max_length=limits.MAX_NAME_CHARS)] = ""
    """Digest of the newest version (for the learner): the same weights get the same number again after a restart."""
    weights_endpoint: str = ""
    """Where the newest version can be fetched; empty while no learner has announced one."""
    next_batch: Count = 0
    """Index of the first batch that no checkpoint covers (for the learner)."""
    fingerprint: str = ""
    """Digest of what all processes of a run must agree on (model, environment, sampling); empty when not checked."""
    session: Session = ""
    broker: Count = 0
    num_brokers: Count = 1
    """Always these two: gspo 0.1.0 also had several brokers, and Welcome keeps its fields."""
    commit: LedgerCommit | None = None
    """The newest one of the broker's ledger; None from a weight server."""
    begun_on: Annotated[str, Meta(max_length=limits.MAX_NAME_CHARS)] = ""
    """The day on which the run began, as 26 Jul 2024 (for rollouts: templates may write it); empty: unknown."""


class Refused(Message, frozen=True, tag="refused", forbid_unknown_fields=False):
    """Broker or weight server -> peer: a message was not accepted. The connection continues unless ``fatal``.

    ``retry_s``: a Hello that time will help. The sender says it again after this long, as often as it takes; 0: it decides.
    """

    reason: Reason
    message_type: str = ""
    fatal: bool = False
    retry_s: Annotated[float, Meta(ge=0.0, le=limits.MAX_RETRY_S)] = 0.0
    session: Session = ""
    protocol_version: Count | None = None
    """The sender's, in the refusal of a peer of another release; None in any other refusal."""


class Ack(Message, frozen=True, tag="ack"):
    """Receiver -> sender: every sequenced message below ``next_seq`` is durable (cumulative)."""

    next_seq: Count
    session: Session = ""
    commit: LedgerCommit | None = None
    """The newest one of the broker's ledger, which holds what is acknowledged."""

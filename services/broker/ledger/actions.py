"""What the ledger asks the shell to do. Effects outside the broker come after the round's rows are durable."""

from typing import Any, NamedTuple

import msgspec

from gspo_protocol.messages import Chunk, GroupSampling, Message, Refused, Split
from gspo_protocol.messages.base import shortened
from gspo_protocol.messages.gathered import Gathered
from gspo_protocol.messages.stretches import Stretch
from gspo_protocol.sessions import session_tag
from gspo_services.broker.quotas import RETRY_S, OffenceReason
from gspo_services.broker.rows import Row, TrajectoryRow


class SessionKey(NamedTuple):
    """One life of a peer: its name, and the session that stands for this life."""

    peer: str
    session: str

    @property
    def tag(self) -> str:
        """A public name for the session in texts: the session itself is a secret."""
        return session_tag(self.session)


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all actions."""


class Save(Action, frozen=True, kw_only=True):
    """Write this row (a later one with the same key replaces it)."""

    row: Row


class AppendChunk(Action, frozen=True, kw_only=True):
    """Write the chunk that was just handed in, with its arrays."""

    chunk: Chunk
    peer: str
    """The lease's holder, which sent the chunk."""


class AppendChunks(Action, frozen=True, kw_only=True):
    """Write chunks of the message that was just handed in, and rows of their trajectories."""

    chunks: Gathered
    peer: str
    stretches: list[Stretch] = []
    """Which chunks; those of one stretch become one row on disk."""
    rows: list[TrajectoryRow] = []
    """Rows to write with them; other rows lag behind their chunks (see ``ledger.extensions``)."""


class Reply(Action, frozen=True, kw_only=True):
    """Send a message without arrays."""

    to: SessionKey
    message: Message


class Announce(Action, frozen=True, kw_only=True):
    """Send a hint to every known rollout."""

    message: Message


class GrantLease(Action, frozen=True, kw_only=True):
    """Send a Lease: the shell adds the task and the acknowledged tokens."""

    to: SessionKey
    trajectory_id: int
    epoch: int
    group_id: int
    split: Split
    task_index: int
    seed: int
    sampling: GroupSampling
    num_tokens: int
    num_entries: int = 0
    """Entries of the journal."""
    source: str = "train"
    """The task's source: "train", "eval", or "eval/" and the name of a set."""
    members: tuple[TrajectoryRow, ...] = ()
    """The group whose answers are to be compared: a Grade is sent. Empty for a Lease."""


class DeliverBatch(Action, frozen=True, kw_only=True):
    """Send what batch ``index`` consists of as it is recorded, and its first part."""

    to: SessionKey
    index: int


class DeliverParts(Action, frozen=True, kw_only=True):
    """Send ``count`` parts of batch ``index``, from ``part`` on, as far as there are so many."""

    to: SessionKey
    index: int
    part: int
    count: int


class Reshelve(Action, frozen=True, kw_only=True):
    """A learner went back to an older checkpoint: read again which batches may be quarantined (see ``Ledger.reshelve``)."""


class WriteMetrics(Action, frozen=True, kw_only=True):
    """Append one line to metrics.jsonl; the shell adds the time."""

    line: dict[str, Any]


class Offence(Action, frozen=True, kw_only=True):
    """An offence of a rollout; the shell counts it."""

    by: SessionKey
    reason: OffenceReason


class Note(Action, frozen=True, kw_only=True):
    """One event for the log."""

    event: str
    fields: dict[str, Any]
    level: str = "info"


def refused(sender: SessionKey, reason: str, kind: str, *, fatal: bool = False, retry_s: float = 0.0) -> Reply:
    return Reply(to=sender, message=Refused(reason=shortened(reason), message_type=kind, fatal=fatal, retry_s=retry_s))


def shut_out(sender: SessionKey, seconds: float) -> Reply:
    reason = f"hello: {sender.peer} is shut out for {seconds:.0f} s for what it sent; its log and `gspo doctor` say what"
    return refused(sender, reason, "hello", retry_s=min(seconds, RETRY_S))

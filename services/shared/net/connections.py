"""What libzmq holds of each connection, and which connections hold too much. Pure.

libzmq keeps a message until its last frame has come, and shows nothing of it before. But the kernel counts what it has
received over a connection; what of that was not handed over as messages is held by libzmq.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

SLACK_BYTES: Final = 64 * 1024
"""The handshake, and what libzmq has read and not yet put in a queue."""
MAX_HELD_BYTES: Final = 64 * 1024 * 1024
"""Bytes held for all connections together; above it the largest of the address with most is broken."""


class InKernel(NamedTuple):
    """What the kernel says about a connection: bytes ever received, and those that libzmq has not read yet."""

    num_bytes: int
    num_unread: int


@dataclass(kw_only=True)
class Connection:
    """One accepted connection. ``key`` and ``peer`` are known once a message came over it."""

    fd: int
    address: tuple[str, int]
    since: float = 0.0
    """When it was noticed."""
    key: bytes = b""
    peer: bytes = b""
    delivered: int = 0
    """Bytes of messages that were handed over, as they were on the wire."""
    held: int = 0
    suspect: int = 0
    """What was held when everything whole had to be handed over next; 0: not too much."""
    suspected_at: int = 0


class Excess(NamedTuple):
    """A connection that holds too much, and what of it: a message without an end, or messages beyond its credit."""

    connection: Connection
    reason: str


class Drain(Protocol):
    """The reader of the channel. ``num_drained`` grows whenever it finds that nothing whole is left to read; then
    ``is_waiting``."""

    num_drained: int
    is_waiting: bool


@dataclass(kw_only=True)
class Connections:
    """The connections of one channel. ``max_unfinished``: bytes of a message on its way; ``max_held``: of all together."""

    channel: str
    max_unfinished: int
    max_held: int
    by_fd: dict[int, Connection] = field(default_factory=dict)
    listener: int = -1
    paused: dict[str, float] = field(default_factory=dict)
    """Hosts that may make no new connections, and until when."""

    def accepted(self, fd: int, address: tuple[str, int], since: float) -> None:
        """A connection was made; a former one with its descriptor is gone."""
        self.by_fd[fd] = Connection(fd=fd, address=address, since=since)

    def closed(self, fd: int) -> None:
        self.by_fd.pop(fd, None)

    def delivered(self, fd: int, wire_bytes: int, peer: bytes, key: bytes) -> None:
        """A message of a connection was handed over."""
        connection = self.by_fd.get(fd)
        if connection is not None:
            connection.delivered += wire_bytes
            connection.peer, connection.key = peer, key

    def look(self, received: dict[int, InKernel], drain: Drain) -> list[Excess]:
        """The connections that hold too much. ``received``: by descriptor, as it is now."""
        found: list[Excess] = []
        for fd, (num_bytes, num_unread) in received.items():
            connection = self.by_fd.get(fd)
            if connection is None:
                continue
            # What was delivered of a former connection with this descriptor must not count for this one.
            connection.delivered = min(connection.delivered, num_bytes)
            connection.held = num_bytes - num_unread - connection.delivered
            if connection.held > self.max_held + SLACK_BYTES:
                found.append(Excess(connection, "messages beyond its credit"))
            elif self._is_unfinished(connection, num_bytes - num_unread, drain):
                found.append(Excess(connection, "a message without an end"))
        return found

    def _is_unfinished(self, connection: Connection, read: int, drain: Drain) -> bool:
        """Whether what is held must be one message: since it was read, everything whole has been handed over."""
        limit = self.max_unfinished + SLACK_BYTES
        if connection.suspect and drain.num_drained > connection.suspected_at:
            unfinished = connection.suspect - connection.delivered
            connection.suspect = 0
            if unfinished > limit:
                return True
        if connection.held > limit and not connection.suspect:
            connection.suspect, connection.suspected_at = read, drain.num_drained
        return False

    @property
    def has_suspects(self) -> bool:
        return any(connection.suspect for connection in self.by_fd.values())


def largest(channels: list[Connections]) -> Excess | None:
    """If all connections together hold too much: the largest of the address that holds most."""
    every = [connection for channel in channels for connection in channel.by_fd.values() if connection.held > SLACK_BYTES]
    if sum(connection.held for connection in every) <= MAX_HELD_BYTES:
        return None
    by_host: Counter[str] = Counter()
    for connection in every:
        by_host[connection.address[0]] += connection.held
    host = by_host.most_common(1)[0][0]
    worst = max((each for each in every if each.address[0] == host), key=lambda each: each.held)
    return Excess(worst, "the most, when all connections held too much together")

"""Tracks what libzmq holds of each connection, and finds connections that hold too much. Pure.

libzmq keeps a message until its last frame has come, and shows nothing of it before. But the kernel counts what it has
received over a connection; what of that was not handed over as messages is held by libzmq.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

SLACK_BYTES: Final = 64 * 1024
"""Bytes of the handshake, and of data that libzmq has read but not yet queued."""
MAX_HELD_BYTES: Final = 64 * 1024 * 1024
"""The most bytes held for all connections; above it the largest connection of the address that holds most is broken."""


class InKernel(NamedTuple):
    """The kernel's numbers for a connection: bytes received in total, and those that libzmq has not read yet."""

    num_bytes: int
    num_unread: int


@dataclass(kw_only=True)
class Connection:
    """One accepted connection. ``key`` and ``peer`` are known once it has delivered a message."""

    fd: int
    address: tuple[str, int]
    since: float = 0.0
    """It was accepted no earlier."""
    key: bytes = b""
    peer: bytes = b""
    delivered: int = 0
    """Wire bytes of the messages that were handed over."""
    held: int = 0
    suspect: int = 0
    """What was held when everything whole had to be handed over next; 0: not too much."""
    suspected_at: int = 0


class Excess(NamedTuple):
    """A connection that holds too much, and why: an unfinished message, or messages beyond its credit."""

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
        """Add a new connection; an earlier one with its descriptor is gone."""
        self.by_fd[fd] = Connection(fd=fd, address=address, since=since)

    def closed(self, fd: int) -> None:
        self.by_fd.pop(fd, None)

    def delivered(self, fd: int, wire_bytes: int, peer: bytes, key: bytes) -> None:
        """Count a message that a connection delivered."""
        connection = self.by_fd.get(fd)
        if connection is not None:
            connection.delivered += wire_bytes
            connection.peer, connection.key = peer, key

    def look(self, received: dict[int, InKernel], drain: Drain) -> list[Excess]:
        """Return the connections that hold too much. ``received``: the current numbers by descriptor."""
        found: list[Excess] = []
        for fd, (num_bytes, num_unread) in received.items():
            connection = self.by_fd.get(fd)
            if connection is None:
                continue
            # Bytes delivered by an earlier connection with this descriptor must not count for this one.
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
    """Return the largest connection of the address that holds most, if all together hold too much."""
    every = [connection for channel in channels for connection in channel.by_fd.values() if connection.held > SLACK_BYTES]
    if sum(connection.held for connection in every) <= MAX_HELD_BYTES:
        return None
    by_host: Counter[str] = Counter()
    for connection in every:
        by_host[connection.address[0]] += connection.held
    host = by_host.most_common(1)[0][0]
    worst = max((each for each in every if each.address[0] == host), key=lambda each: each.held)
    return Excess(worst, "the most, when all connections held too much together")

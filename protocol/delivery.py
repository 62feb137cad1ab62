"""Reliable, ordered delivery over a connection that may lose its tail: sequence numbers, cumulative acknowledgements,
redelivery, duplicates. Go-back-N with a bounded window; pure (time comes in as a number), no sockets.

The sender keeps every sequenced message until it is acknowledged, and sends all of them again after a reconnect or when no
acknowledgement came for ``resend_s``. Each time in vain doubles that pause, and a late acknowledgement sets it to twice its
delay: a receiver that is behind would fall further behind with each copy. The receiver takes messages in order only: it
ignores a message behind a gap, because an earlier one was lost, and the sender's resend fills the gap.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final, Generic, TypeVar

from gspo_protocol.limits import WINDOW_BYTES

T = TypeVar("T")

MOST_PAUSES: Final = 4
"""The pause before everything is sent again grows up to this times ``resend_s``: what was lost waits no longer than that."""


class Outbox(Generic[T]):
    """Sender's side. ``window`` (messages) and ``window_bytes`` bound what is unacknowledged: ``has_room`` is the credit.

    One message may exceed ``window_bytes``, so that a message of any size can be sent.

    produces:     (seq, item) pairs to put on the wire
    waits for:    acknowledgements
    unblocked by: ``acknowledge``; ``reconnected`` and ``due`` return everything again
    """

    def __init__(self, window: int, resend_s: float, window_bytes: int = WINDOW_BYTES) -> None:
        if window < 1:
            raise ValueError(f"window is {window}: at least 1 message must be allowed under way")
        self._window = window
        self._window_bytes = window_bytes
        self._num_bytes = 0
        self._sizes: deque[int] = deque()
        self._resend_s = self._pause_s = resend_s
        self._sent_again_below = 0
        self._unacked: deque[tuple[int, T]] = deque()
        self._next_seq = 0
        self._last_progress = 0.0

    @property
    def has_room(self) -> bool:
        return len(self._unacked) < self._window and self._num_bytes < self._window_bytes

    @property
    def num_unacked(self) -> int:
        return len(self._unacked)

    @property
    def next_seq(self) -> int:
        """The sequence number that ``push`` gives to the next item."""
        return self._next_seq

    @property
    def first_seq(self) -> int:
        """The oldest unacknowledged sequence number: what Hello tells the receiver to expect next."""
        return self._unacked[0][0] if self._unacked else self._next_seq

    def push(self, item: T, now: float, num_bytes: int = 0) -> int:
        """Take ``item`` of ``num_bytes``; returns its sequence number. Raises: ValueError when the window is full."""
        if not self.has_room:
            raise ValueError(f"window of {self._window} unacknowledged messages or {self._window_bytes} bytes is full")
        if not self._unacked:
            self._last_progress = now
        seq = self._next_seq
        self._next_seq += 1
        self._unacked.append((seq, item))
        self._sizes.append(num_bytes)
        self._num_bytes += num_bytes
        return seq

    def acknowledge(self, next_seq: int, now: float) -> list[T]:
        """Everything below ``next_seq`` is durable at the receiver; returns the items that this covers."""
        covered = []
        while self._unacked and self._unacked[0][0] < next_seq:
            covered.append(self._unacked.popleft()[1])
            self._num_bytes -= self._sizes.popleft()
        if covered:
            if next_seq > self._sent_again_below:
                # A message that went out twice does not say which copy was acknowledged, and so how late.
                self._pause_s = self._bounded(2 * (now - self._last_progress))
            self._last_progress = now
        return covered

    def reconnected(self, now: float) -> Sequence[tuple[int, T]]:
        """After a new handshake: everything unacknowledged, oldest first, to be sent again."""
        self._last_progress = now
        self._sent_again_below = self._next_seq
        return tuple(self._unacked)

    def due(self, now: float) -> Sequence[tuple[int, T]]:
        """Return everything unacknowledged if nothing was acknowledged for the pause (at first ``resend_s``)."""
        if not self._unacked or now - self._last_progress < self._pause_s:
            return ()
        self._pause_s = self._bounded(2 * self._pause_s)
        return self.reconnected(now)

    def _bounded(self, pause_s: float) -> float:
        return min(max(pause_s, self._resend_s), MOST_PAUSES * self._resend_s)


class Inbox:
    """Receiver's side, one per peer and session.

    ``offer`` says whether a message is the next one. ``committed`` moves the acknowledgement: call it when the message is
    durable, so that nothing is acknowledged that a crash could take back.
    """

    def __init__(self, first_seq: int) -> None:
        self._expected = first_seq
        self._durable = first_seq

    @property
    def next_seq(self) -> int:
        """What the cumulative acknowledgement says: everything below is durable."""
        return self._durable

    def offer(self, seq: int) -> bool:
        """True: take it. False: a duplicate, or a message behind a gap (the sender will send it again)."""
        if seq != self._expected:
            return False
        self._expected += 1
        return True

    def skip_to(self, seq: int) -> None:
        """The sender says that everything below ``seq`` was acknowledged, maybe by a former life of the receiver."""
        if seq > self._expected:
            self._expected = self._durable = seq

    def committed(self) -> int:
        """All that was taken is durable now; returns the cumulative acknowledgement."""
        self._durable = self._expected
        return self._durable

"""What was received and is not handled yet: a bounded queue for each peer, taken from in turn. Pure."""

import heapq
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(kw_only=True)
class _Waiting(Generic[T]):
    items: deque[tuple[T, int]] = field(default_factory=deque)
    num_bytes: int = 0


class FairQueue(Generic[T]):
    """Each peer has its own bounds, and all together have one. What is over a bound is dropped.

    Nothing is lost by that: a sequenced message is not acknowledged, so its sender sends it again; any other is repeated.
    """

    def __init__(self, *, max_messages: int, max_bytes: int) -> None:
        """``max_messages`` and ``max_bytes`` bound all peers together."""
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        # In the order of the next turns.
        self._peers: dict[Hashable, _Waiting[T]] = {}
        self._num_messages = 0
        self._num_bytes = 0
        # While there is too much, the largest first: (less its size, a number that breaks ties, peer). An entry whose size
        # has changed since is void. A look at every peer for each message would cost most when there is most to do.
        self._by_size: list[tuple[int, int, Hashable]] = []
        self._in_bytes = False
        self._entries = count()

    def __len__(self) -> int:
        return self._num_messages

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def offer(self, peer: Hashable, item: T, num_bytes: int, *, max_messages: int, max_bytes: int) -> bool:
        """Take ``item`` of ``num_bytes`` from ``peer``, which may have ``max_messages`` and ``max_bytes`` here.

        Returns False when it was dropped. When all peers together have too much, the one with most loses its last message.
        """
        waiting = self._peers.get(peer)
        if waiting is None:
            waiting = self._peers[peer] = _Waiting()
        elif len(waiting.items) >= max_messages or waiting.num_bytes + num_bytes > max_bytes:
            return False
        waiting.items.append((item, num_bytes))
        self._count(waiting, 1, num_bytes)
        if self._by_size:
            self._enter(peer)
        kept = True
        while self._num_messages > self._max_messages or self._num_bytes > self._max_bytes:
            kept = self._drop_last(self._largest()) != peer and kept
        return kept

    def take(self) -> T:
        """Take the oldest message of the next peer in turn. Raises: IndexError when the queue is empty."""
        if not self._peers:
            raise IndexError("nothing is waiting")
        peer = next(iter(self._peers))
        waiting = self._peers.pop(peer)
        item, num_bytes = waiting.items.popleft()
        self._count(waiting, -1, -num_bytes)
        if waiting.items:
            self._peers[peer] = waiting
            if self._by_size:
                self._enter(peer)
        if self._has_too_many_entries():
            self._by_size.clear()
        return item

    def _count(self, waiting: _Waiting[T], messages: int, num_bytes: int) -> None:
        waiting.num_bytes += num_bytes
        self._num_messages += messages
        self._num_bytes += num_bytes

    def _largest(self) -> Hashable:
        """The peer with most, of what there is too much of."""
        in_bytes = self._num_bytes > self._max_bytes
        if in_bytes != self._in_bytes or not self._by_size or self._has_too_many_entries():
            self._in_bytes = in_bytes
            self._by_size.clear()
            for peer in self._peers:
                self._enter(peer)
        while True:
            size, _, peer = self._by_size[0]
            if peer in self._peers and -size == self._size(peer):
                return peer
            heapq.heappop(self._by_size)

    def _has_too_many_entries(self) -> bool:
        return len(self._by_size) > 2 * self._max_messages

    def _enter(self, peer: Hashable) -> None:
        heapq.heappush(self._by_size, (-self._size(peer), next(self._entries), peer))

    def _size(self, peer: Hashable) -> int:
        waiting = self._peers[peer]
        return waiting.num_bytes if self._in_bytes else len(waiting.items)

    def _drop_last(self, peer: Hashable) -> Hashable:
        waiting = self._peers[peer]
        _, num_bytes = waiting.items.pop()
        self._count(waiting, -1, -num_bytes)
        if not waiting.items:
            del self._peers[peer]
        elif self._by_size:
            self._enter(peer)
        return peer

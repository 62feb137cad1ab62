"""How many leases a rollout asks of which broker.

Each free place goes to the broker that may be asked and has the fewest leases here. So each gets its share of the places,
one that has no work leaves none of them empty, and one that comes back gets its share as episodes end. What was asked for
counts like what has come, so that all brokers together give no more than there is room for.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

REQUEST_TIMEOUT_S: Final = 3.0
"""A request without an answer for this long was lost, or its leases were."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request that is to be sent now."""

    broker: int
    request_id: int
    capacity: int


@dataclass(kw_only=True)
class _Asked:
    """Of one broker."""

    request_id: int = 0
    asked_at: float = 0.0
    expected: int = 0
    """Leases of the last request that are still to come."""
    again_at: float = 0.0
    """It is not asked before."""
    order: int = 0
    """Who was asked later has a larger one."""

    def waits(self, now: float) -> bool:
        """Whether a request is under way."""
        return self.expected > 0 and now - self.asked_at < REQUEST_TIMEOUT_S


class LeaseRequests:
    """The requests of a rollout with ``most`` places. Times are of a monotonic clock, in seconds."""

    def __init__(self, num_brokers: int, most: int) -> None:
        self._brokers = [_Asked() for _ in range(num_brokers)]
        self._most = most
        self._num_asked = 0

    def ask(self, now: float, held: Sequence[int], may_ask: Callable[[int], bool]) -> list[Ask]:
        """What to ask now, of whom has the fewest leases first. It counts as under way from here on.

        ``held``: leases in hand, by broker. ``may_ask``: whether a broker is there, and gives leases to this rollout.
        """
        expected = sum(each.expected for each in self._brokers if each.waits(now))
        room = self._most - sum(held) - expected
        if room <= 0:
            return []
        free = [
            (held[broker], each.order, broker)
            for broker, each in enumerate(self._brokers)
            if not each.waits(now) and now >= each.again_at and may_ask(broker)
        ]
        heapq.heapify(free)
        asks = []
        wanted = {broker: 0 for _, _, broker in sorted(free)}
        for _ in range(room if free else 0):
            num_leases, order, broker = free[0]
            wanted[broker] += 1
            heapq.heapreplace(free, (num_leases + 1, order, broker))
        for broker, capacity in wanted.items():
            if capacity:
                each = self._brokers[broker]
                self._num_asked += 1
                each.order = self._num_asked
                each.request_id += 1
                each.asked_at, each.expected = now, capacity
                asks.append(Ask(broker=broker, request_id=each.request_id, capacity=capacity))
        return asks

    def leased(self, broker: int) -> None:
        """A lease has come."""
        each = self._brokers[broker]
        each.expected = max(0, each.expected - 1)

    def refused(self, broker: int, request_id: int, again_at: float) -> bool:
        """There are no more leases for a request; ask again at ``again_at``. Returns whether it was the broker's last."""
        each = self._brokers[broker]
        if request_id != each.request_id:
            return False
        each.expected, each.again_at = 0, again_at
        return True

    def welcomed(self, broker: int) -> None:
        """A new handshake: requests from before it do not count any more."""
        each = self._brokers[broker]
        each.expected, each.again_at = 0, 0.0

    def pause(self, again_at: float) -> None:
        """Nobody is asked before ``again_at``."""
        for each in self._brokers:
            each.again_at = again_at

    def pauses_until(self, now: float) -> float | None:
        """When the first pause ends; None: there is none."""
        return min((each.again_at for each in self._brokers if each.again_at > now), default=None)

"""Decides how often something may happen for each of many keys. Pure: time comes in as a number."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Buckets(Generic[K]):
    """Each key may do something ``burst`` times at once, and ``per_s`` times more each second. ``most`` keys are kept."""

    def __init__(self, *, burst: float, per_s: float, most: int) -> None:
        self._burst = burst
        self._per_s = per_s
        self._most = most
        self._levels: OrderedDict[K, tuple[float, float]] = OrderedDict()

    def take(self, key: K, now: float) -> bool:
        """Whether ``key`` may do it now; if so, it is counted."""
        level, at = self._levels.pop(key, (0.0, now))
        level = max(0.0, level - (now - at) * self._per_s)
        allowed = level + 1 <= self._burst
        self._levels[key] = (level + allowed, now)
        if len(self._levels) > self._most:
            self._levels.popitem(last=False)
        return allowed

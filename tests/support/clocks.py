"""A clock that only moves when a test says so."""


class VirtualClock:
    """Seconds that pass only by ``advance``."""

    def __init__(self, now: float = 1000.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds

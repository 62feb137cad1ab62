"""When a standby takes over. Pure: what it saw of the leader, and its own clock.

No two machines' clocks are compared. A leader renews its row about every second; a standby that has seen the row unchanged
for long enough, while the database answered, tries to take its place. If it was wrong the leader is fenced off, and nothing
is lost.
"""

from typing import Final

MAX_STEP_S: Final = 1.0
"""A longer time between two looks was a suspension, or the database was away: the leader could not renew either."""


class LeaderWatch:
    """One standby's view of the leader."""

    def __init__(self, takeover_s: float) -> None:
        self._takeover_s = takeover_s
        self._seen: tuple[int, int] | None = None
        self._last_look = 0.0
        self.silent_s = 0.0
        """How long the leader has not renewed, as far as was looked."""

    def may_take(self, epoch: int, renewals: int, released: bool, now: float) -> bool:
        """Whether to take the leader's place, after a look at ``now`` (seconds of any steady clock)."""
        step, self._last_look = min(now - self._last_look, MAX_STEP_S), now
        if self._seen == (epoch, renewals):
            self.silent_s += step
        else:
            self._seen, self.silent_s = (epoch, renewals), 0.0
        return released or self.silent_s >= self._takeover_s

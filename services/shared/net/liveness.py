"""Decides when to ask a connection for a sign of life, and when to replace it. Pure.

TCP takes minutes to notice that the other end of a connection has vanished. Here the connecting end notices: everything
that it sends is answered, if only by a Pulse or an Ack.
"""

from typing import Final, Literal

ASK_S: Final = 2.0
"""Without an answer for this long, Hello is repeated: it is always answered."""
GIVE_UP_S: Final = 4.0
"""Without an answer for this long, a new connection is made: before the learner's own lease ends..."""
GIVE_UP_MOST_S: Final = 48.0
"""...and after twice as long each further one, up to this: an end that cannot answer now is not flooded with connections."""
SLOW_FOR_S: Final = 30.0
"""An end that answered late is given twice its delay from then on, and half of that after this long, and so on."""
MAX_STEP_S: Final = 1.0
"""A longer time between two looks was a suspension, during which nobody listened."""

Verdict = Literal["fine", "ask", "connect_again"]


class Liveness:
    """One connection, as the connecting side sees it."""

    def __init__(self, now: float) -> None:
        self._expecting = False
        self._silent_s = 0.0
        self._asked_at_s = 0.0
        # What a slow end that works is given: each new connection costs it more than an answer, and loses those under way.
        self._patience_s = GIVE_UP_S
        self._patient_for_s = 0.0
        self._give_up_s = GIVE_UP_S
        self._last_look = now

    def sent(self) -> None:
        """Note that something was sent that will be answered."""
        if not self._expecting:
            self._expecting, self._give_up_s = True, self._patience_s

    def heard(self) -> None:
        """Note that something was received."""
        if 2 * self._silent_s > self._patience_s:
            self._patience_s, self._patient_for_s = min(2 * self._silent_s, GIVE_UP_MOST_S), 0.0
        self._expecting = False
        self._silent_s = self._asked_at_s = 0.0

    def look(self, now: float) -> Verdict:
        """Decide what to do now. Call this often."""
        step, self._last_look = min(now - self._last_look, MAX_STEP_S), now
        self._calm_down(step)
        if not self._expecting:
            return "fine"
        self._silent_s += step
        if self._silent_s >= self._give_up_s:
            self._silent_s = self._asked_at_s = 0.0
            self._give_up_s = min(2 * self._give_up_s, GIVE_UP_MOST_S)
            return "connect_again"
        if self._silent_s - self._asked_at_s >= max(ASK_S, self._patience_s / 2):
            self._asked_at_s = self._silent_s
            return "ask"
        return "fine"

    def _calm_down(self, step: float) -> None:
        self._patient_for_s += step
        if self._patient_for_s >= SLOW_FOR_S:
            self._patience_s, self._patient_for_s = max(GIVE_UP_S, self._patience_s / 2), 0.0

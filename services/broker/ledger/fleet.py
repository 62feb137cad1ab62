"""Decides which state a rollout is in, with a table of which state may follow which.

    starting -> verifying -> serving -> draining -> gone          quarantined: from anywhere before draining, and back

A rollout reports its state about once a second and may pass through several in between, so a step may skip some. A new life
of a rollout begins with "starting", whatever state the last one was in. Only a rollout that serves gets leases.
"""

from typing import Any, Final, Literal, get_args

from gspo_protocol.limits import MAX_PEERS
from gspo_protocol.messages.work import RolloutStatus
from gspo_services.broker.ledger.actions import Note

State = RolloutStatus | Literal["gone"]
STATES: Final[tuple[str, ...]] = (*get_args(RolloutStatus), "gone")
NEXT: Final[dict[State, frozenset[State]]] = {
    "starting": frozenset({"verifying", "serving", "quarantined", "draining", "gone"}),
    "verifying": frozenset({"serving", "quarantined", "draining", "gone"}),
    "serving": frozenset({"quarantined", "draining", "gone"}),
    "quarantined": frozenset({"verifying", "serving", "draining", "gone"}),
    "draining": frozenset({"gone"}),
    "gone": frozenset(),
}
"""What may follow within one life; the next one begins with "starting"."""


class Fleet:
    """The state of every rollout by name, including those that have left; the oldest of these are forgotten."""

    def __init__(self) -> None:
        self._states: dict[str, State] = {}

    def state(self, peer: str) -> State | None:
        """Return a rollout's state; None: unknown."""
        return self._states.get(peer)

    def begins(self, peer: str) -> list[Note]:
        """Note that a new life of a rollout said Hello."""
        former = self._states.pop(peer, None)
        self._forget_oldest()
        self._states[peer] = "starting"
        return [_note(peer, former, "starting", "hello")]

    def changes(self, peer: str, state: State, reason: str) -> list[Note]:
        """Note that a rollout reports or shows ``state``; returns no notes if the state is unchanged.

        A transition that is not in the table is accepted with a warning: the rollout knows better, and a wrong table
        must not stop a run.
        """
        former = self._states.get(peer)
        if former is None or former == state:
            return []
        impossible = state not in NEXT[former]
        if state == "gone":
            del self._states[peer]  # The last to have left is the last to be forgotten.
        self._states[peer] = state
        return [_note(peer, former, state, reason, impossible=impossible)]

    def counts(self) -> dict[str, int]:
        """Count the rollouts by state."""
        states = list(self._states.values())
        return {name: sum(1 for state in states if state == name) for name in STATES}

    @property
    def gone(self) -> list[str]:
        """Names of those that have left and not come back."""
        return [peer for peer, state in self._states.items() if state == "gone"]

    def _forget_oldest(self) -> None:
        if len(self._states) >= 2 * MAX_PEERS:
            del self._states[self.gone[0]]  # There are at most MAX_PEERS others.


def _note(peer: str, former: State | None, state: State, reason: str, *, impossible: bool = False) -> Note:
    fields: dict[str, Any] = {"peer": peer, "former": former, "state": state, "reason": reason}
    if impossible:
        return Note(event="rollout_state_impossible", fields=fields, level="warning")
    return Note(event="rollout_state", fields=fields)

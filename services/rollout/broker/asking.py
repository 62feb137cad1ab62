"""When a rollout asks its broker for leases, and for how many: one request at a time, for all free places."""

from dataclasses import dataclass
from typing import Final

REQUEST_TIMEOUT_S: Final = 3.0
"""A request without an answer for this long was lost, or its leases were."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request that is to be sent now."""

    request_id: int
    capacity: int


class LeaseRequests:
    """The requests of a rollout with ``most`` places. Times are of a monotonic clock, in seconds."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._request_id = 0
        self._asked_at = 0.0
        self._expected = 0
        """Leases of the last request that are still to come."""
        self._again_at = 0.0
        """Nothing is asked before."""

    def ask(self, now: float, held: int) -> Ask | None:
        """Return what to ask now, with ``held`` leases in hand; None: nothing. It counts as under way from here on."""
        is_under_way = self._expected > 0 and now - self._asked_at < REQUEST_TIMEOUT_S
        room = self._most - held
        if is_under_way or now < self._again_at or room <= 0:
            return None
        self._request_id += 1
        self._asked_at, self._expected = now, room
        return Ask(request_id=self._request_id, capacity=room)

    def leased(self) -> None:
        """A lease has come."""
        self._expected = max(0, self._expected - 1)

    def refused(self, request_id: int, again_at: float) -> bool:
        """There are no more leases for a request; ask again at ``again_at``. Returns whether it was the last one."""
        if request_id != self._request_id:
            return False
        self._expected, self._again_at = 0, again_at
        return True

    def welcomed(self) -> None:
        """A new handshake: requests from before it do not count any more."""
        self._expected, self._again_at = 0, 0.0

    def pause(self, again_at: float) -> None:
        """Ask for nothing before ``again_at``."""
        self._again_at = again_at

    def pauses_until(self, now: float) -> float | None:
        """When the pause ends; None: there is none."""
        return self._again_at if self._again_at > now else None

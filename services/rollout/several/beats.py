"""Which of several brokers hear the next heartbeat: together as many as one broker alone would.

A heartbeat costs a broker more than the chunks of a slow episode. So of K brokers each is due in every K-th beat, as long as
its leases stay renewed well before they end.
"""

from typing import Final

from gspo_services.rollout.broker import HEARTBEAT_S, INTERVAL_MOST_S

LEASE_SHARE: Final = 0.2
"""The most between two heartbeats to a broker, as a share of broker.lease_s: four of them may get lost."""


class BeatsInTurn:
    """The ``Beats`` of several brokers: one every ``heartbeat_s`` seconds, to ``num_brokers`` in turn. Leases end
    ``lease_s`` after the last one."""

    def __init__(self, num_brokers: int, *, lease_s: float, heartbeat_s: float = HEARTBEAT_S) -> None:
        most = int(min(INTERVAL_MOST_S, lease_s * LEASE_SHARE) / heartbeat_s)
        self._every: Final = max(1, min(num_brokers, most))
        self._num_brokers = num_brokers
        self._num_beats = 0
        self.heartbeat_s: Final = heartbeat_s

    @property
    def interval_s(self) -> float:
        """From one heartbeat to the next that the same broker hears."""
        return self._every * self.heartbeat_s

    def next(self) -> list[int]:
        """The numbers of the brokers that are due now."""
        due = [broker for broker in range(self._num_brokers) if (self._num_beats - broker) % self._every == 0]
        self._num_beats += 1
        return due

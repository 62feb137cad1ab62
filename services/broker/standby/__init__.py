"""A broker that waits until it leads: it follows the run's log, and takes over when the leader is gone."""

from gspo_services.broker.standby.leading import Leading, lead
from gspo_services.broker.standby.watch import LeaderWatch

__all__ = ["LeaderWatch", "Leading", "lead"]

"""A rollout's end of the work channel: the connection to its broker, and when it is asked for leases."""

from gspo_services.rollout.broker.asking import Ask, LeaseRequests
from gspo_services.rollout.broker.connection import HEARTBEAT_S, SILENT_S, no_answer, open_broker, why_away

__all__ = [
    "HEARTBEAT_S",
    "SILENT_S",
    "Ask",
    "LeaseRequests",
    "no_answer",
    "open_broker",
    "why_away",
]

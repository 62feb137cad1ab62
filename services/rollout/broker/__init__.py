"""A rollout's end of the work channel: its broker, how many leases are asked for, when it beats, which version counts."""

from gspo_services.rollout.broker.asking import Ask, LeaseRequests
from gspo_services.rollout.broker.one import OneBroker, no_answer, open_broker, open_client
from gspo_services.rollout.broker.port import HEARTBEAT_S, INTERVAL_MOST_S, SILENT_S, Beats, Brokers, KnownVersions

__all__ = [
    "HEARTBEAT_S",
    "INTERVAL_MOST_S",
    "SILENT_S",
    "Ask",
    "Beats",
    "Brokers",
    "KnownVersions",
    "LeaseRequests",
    "OneBroker",
    "no_answer",
    "open_broker",
    "open_client",
]

"""The brokers of a rollout, as its wiring chooses them."""

from collections.abc import Sequence

from gspo_services.rollout.broker import HEARTBEAT_S, Brokers, OneBroker
from gspo_services.rollout.several import SeveralBrokers
from gspo_services.shared.net import PeerClient


def brokers_of(clients: Sequence[PeerClient], *, lease_s: float = 15.0, heartbeat_s: float = HEARTBEAT_S) -> Brokers:
    """``clients``: one for each broker."""
    if len(clients) == 1:
        return OneBroker(clients[0], heartbeat_s=heartbeat_s)
    return SeveralBrokers(clients, lease_s=lease_s, heartbeat_s=heartbeat_s)

"""Leases: who may extend which trajectory, and what comes in under them."""

from gspo_services.broker.ledger.leases.holders import HolderMessages
from gspo_services.broker.ledger.leases.leases import Leases

__all__ = ["HolderMessages", "Leases"]

"""Rank 0's connection to the broker and to the rollouts that fetch weights."""

from services.learner.broker.batches import groups_of
from services.learner.broker.client import BrokerClient
from services.learner.broker.exchange import BatchArrived

__all__ = ["BatchArrived", "BrokerClient", "groups_of"]

"""Rank 0's connection to the broker and to the rollouts that fetch weights."""

from services.learner.broker.batches import Answer, BatchArrived, groups_of
from services.learner.broker.port import BrokerPort, ToBroker
from services.learner.broker.thread import BrokerThread

__all__ = ["Answer", "BatchArrived", "BrokerPort", "BrokerThread", "ToBroker", "groups_of"]

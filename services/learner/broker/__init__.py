"""Rank 0's connection to the broker and to the rollouts that fetch weights, and what every rank makes of a batch."""

from gspo_services.learner.broker.assembly import AssembledBatch, Assembly, assemble
from gspo_services.learner.broker.batches import Answer, BatchAnnounced, PartArrived
from gspo_services.learner.broker.no_broker import NoBroker
from gspo_services.learner.broker.port import BrokerPort, ToBroker
from gspo_services.learner.broker.shares import merged_answers, versions_apart
from gspo_services.learner.broker.thread import BrokerThread

__all__ = [
    "Answer",
    "AssembledBatch",
    "Assembly",
    "BatchAnnounced",
    "BrokerPort",
    "BrokerThread",
    "NoBroker",
    "PartArrived",
    "ToBroker",
    "assemble",
    "merged_answers",
    "versions_apart",
]

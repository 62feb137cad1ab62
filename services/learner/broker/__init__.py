"""Rank 0's connection to the broker and to the rollouts that fetch weights, and what every rank makes of a batch."""

from gspo_services.learner.broker.assembly import AssembledBatch, Assembly, assemble
from gspo_services.learner.broker.parts import CREDIT
from gspo_services.learner.broker.port import (
    Answer,
    BatchAnnounced,
    BrokerPort,
    NoBroker,
    PartArrived,
    Publication,
    ToBroker,
)
from gspo_services.learner.broker.publisher import reachable_endpoint
from gspo_services.learner.broker.thread import BrokerThread, RankThread

__all__ = [
    "CREDIT",
    "Answer",
    "AssembledBatch",
    "Assembly",
    "BatchAnnounced",
    "BrokerPort",
    "BrokerThread",
    "NoBroker",
    "PartArrived",
    "Publication",
    "RankThread",
    "ToBroker",
    "assemble",
    "reachable_endpoint",
]

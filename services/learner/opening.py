"""Opens the learner's connection to its broker, and those between the ranks."""

import os
from functools import partial
from typing import Final

import torch

from gspo_services.learner.broker import BrokerThread, RankThread, reachable_endpoint
from gspo_services.learner.checkpoints import known_commit
from gspo_services.learner.metrics import LearnerMetrics
from gspo_services.learner.share import Broadcaster
from gspo_services.shared.runtime.clock import Clock
from gspo_services.shared.runtime.telemetry import Health
from gspo_services.shared.settings import Settings

MAX_ENDPOINT_BYTES: Final = 1024


def broker_thread(
    settings: Settings, *, session: str, clock: Clock, health: Health, metrics: LearnerMetrics
) -> BrokerThread:
    """The connection of rank 0, which is open inside its context."""
    return BrokerThread(
        settings,
        session=session,
        clock=clock,
        health=health,
        metrics=metrics,
        known=partial(known_commit, settings.run.directory / "checkpoints"),
    )


def introduce(engine: Broadcaster, opened: BrokerThread | RankThread, advertised: str) -> None:
    """Tell rank 0 where the other ranks serve their parts of versions. Collective. Raises: EndpointError.

    ``advertised``: where rollouts find rank 0's weight server.
    """
    if engine.world_size == 1:
        return
    table = torch.zeros(engine.world_size, MAX_ENDPOINT_BYTES, dtype=torch.int64)
    if isinstance(opened, RankThread):
        own = reachable_endpoint(opened.endpoint, advertised=advertised, towards=os.environ["MASTER_ADDR"]).encode()
        table[engine.rank, : len(own)] = torch.tensor(list(own))
    rows = engine.sum_over_ranks(table).cpu().tolist()
    if isinstance(opened, BrokerThread):
        opened.know_ranks([bytes(row).rstrip(b"\0").decode() for row in rows[1:]])

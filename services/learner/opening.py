"""Opens the learner's connection to its broker, or to each of several that share the run."""

from collections.abc import Callable
from functools import partial

from gspo_protocol.messages import Batch
from gspo_services.learner.broker import BrokerThread, MakeConnections, OneConnection
from gspo_services.learner.checkpoints import known_commit
from gspo_services.learner.metrics import LearnerMetrics
from gspo_services.shared.runtime.clock import Clock
from gspo_services.shared.runtime.telemetry import Health
from gspo_services.shared.settings import Settings


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
        connections=connections_of(settings.broker.num_brokers),
        known=partial(known_commit, settings.run.directory / "checkpoints"),
    )


def connections_of(num_brokers: int) -> MakeConnections:
    """What connects a learner to so many brokers."""
    if num_brokers == 1:
        return OneConnection
    from gspo_services.learner.several import SeveralConnections

    return SeveralConnections


def versions_apart_of(num_brokers: int) -> Callable[[Batch], int] | None:
    """Says by how many versions the shares of a batch are apart; None: a batch has one share."""
    if num_brokers == 1:
        return None
    from gspo_services.learner.several import versions_apart

    return versions_apart

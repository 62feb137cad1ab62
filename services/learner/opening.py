"""Opens the learner's connection to its broker."""

from functools import partial

from gspo_services.learner.broker import BrokerThread
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
        known=partial(known_commit, settings.run.directory / "checkpoints"),
    )

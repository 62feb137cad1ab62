"""What the schedules of a run change in the training of one batch, as the broker recorded it and every rank received it."""

from dataclasses import replace
from typing import Protocol

from gspo.settings import Objective
from gspo_protocol.messages import Batch
from gspo_services.shared.settings import Settings


class RateEngine(Protocol):
    """The part of an engine that takes a learning rate."""

    def set_learning_rate(self, value: float) -> None: ...


def scheduled_objective(engine: RateEngine, batch: Batch, settings: Settings) -> Objective:
    """Return the objective of ``batch`` and set the learning rate of ``engine``; without a schedule those of the settings.

    Raises: ValueError when the recorded clip width does not go with the objective.
    """
    values, objective = batch.values, settings.objective
    engine.set_learning_rate(settings.learner.learning_rate if values.learning_rate is None else values.learning_rate)
    if values.eps_low is None and values.eps_high is None:
        return objective
    return replace(
        objective,
        eps_low=objective.eps_low if values.eps_low is None else values.eps_low,
        eps_high=objective.eps_high if values.eps_high is None else values.eps_high,
    )

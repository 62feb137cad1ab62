"""What the schedules change in the training of a batch comes with the batch, and without it the settings hold."""

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from gspo.options.overlong import overlong_penalties
from gspo_protocol.messages import TrainingValues
from gspo_services.learner.advantages import AdvantageSettings, sequences_with_advantages
from gspo_services.learner.scheduled import scheduled_objective
from gspo_services.shared.settings import Settings
from tests.support.broker.made_batches import MadeBatch, groups_of
from tests.support.learner.scripted_broker import a_training_batch
from tests.support.learner.serving_bigram import ServingBigram

SETTINGS = Settings.model_validate({"learner": {"learning_rate": 0.5}, "objective": {"eps_low": 1e-3}})


def trained_with(values: TrainingValues) -> tuple[float, float, float]:
    """Learning rate and clip width."""
    engine = ServingBigram()
    batch = msgspec.structs.replace(a_training_batch(0, 1).batch, values=values)
    objective = scheduled_objective(engine, batch, SETTINGS)
    return engine._learning_rate, objective.eps_low, objective.eps_high


def test_the_values_of_a_batch_come_before_the_settings() -> None:
    assert trained_with(TrainingValues(learning_rate=0.25, eps_low=2e-3, eps_high=3e-3)) == (0.25, 2e-3, 3e-3)
    assert trained_with(TrainingValues(eps_high=3e-3)) == (0.5, 1e-3, 3e-3)


def test_a_batch_without_values_is_trained_with_the_settings_whatever_the_one_before_had() -> None:
    assert trained_with(TrainingValues()) == (0.5, 1e-3, SETTINGS.objective.eps_high)


def altered(*changes: dict[str, Any]) -> MadeBatch:
    """A batch whose first trajectories are changed."""
    made = a_training_batch(0, 1)
    batch = made.batch
    items = [msgspec.structs.replace(item, **change) for item, change in zip(batch.items, changes, strict=False)]
    return replace(made, batch=msgspec.structs.replace(batch, items=[*items, *batch.items[len(items) :]]))


def test_each_group_is_trained_at_the_temperature_that_it_was_sampled_with() -> None:
    groups = groups_of(altered({"temperature": 0.5}, {"temperature": 0.5}))
    temperatures = [[sequence.loaded().temperature for sequence in group.sequences] for group in groups]
    assert temperatures == [
        [0.5] * 2,
        *[[1.0] * 2] * 3,
    ]


def test_a_sequence_that_is_longer_than_its_group_allows_is_not_trained() -> None:
    assert groups_of(altered({"max_tokens": 6}, {"max_tokens": 6}))[0].max_tokens == 6
    with pytest.raises(ValueError, match="trajectory 1: a sequence has 6 tokens, 5 allowed"):
        groups_of(altered({}, {"max_tokens": 5}))


def test_what_is_overlong_is_counted_from_each_groups_own_limit() -> None:
    lengths = np.array([20, 20, 40])
    assert overlong_penalties(lengths, max_tokens=np.array([20, 40, 40]), buffer_tokens=10).tolist() == [-1.0, 0.0, -1.0]
    short = {"max_tokens": 6}
    groups = groups_of(altered(short, short))
    settings = AdvantageSettings(normalise_by_std=False, max_tokens=64, overlong_buffer_tokens=6, overlong_penalty=0.5)
    trained, _ = sequences_with_advantages(groups, settings)
    # Both members of the first group lose 0.5, so their advantages stay; nobody else reaches a limit.
    assert [round(float(each.advantages[-1]), 6) for each in trained] == [-0.5, 0.5] * 4
    # A group as long as each other loses alike; what it has lost shows in the deviation of the whole batch.
    by_batch = AdvantageSettings(
        normalise_by_std=True, std_over="batch", max_tokens=64, overlong_buffer_tokens=6, overlong_penalty=8.0
    )
    wide, _ = sequences_with_advantages(groups, by_batch)
    plain, _ = sequences_with_advantages(groups_of(altered()), by_batch)
    assert abs(float(wide[0].advantages[-1])) < abs(float(plain[0].advantages[-1]))

"""A batch reaches the trainer as one object."""

import inspect
from dataclasses import fields, is_dataclass
from typing import get_args, get_type_hints

import pytest

from gspo_services.learner.batch_run import BatchRun
from gspo_services.learner.planned_batch import PlannedBatch, plan_batch
from gspo_services.learner.trainer import train_batch

MOST_PARAMETERS = 5
TOO_MANY_FIELDS = 10


@pytest.mark.parametrize("function", [train_batch, plan_batch, BatchRun.__init__], ids=lambda each: each.__qualname__)
def test_a_batch_is_planned_and_trained_with_few_parameters(function: object) -> None:
    assert callable(function)
    parameters = [name for name in inspect.signature(function).parameters if name != "self"]
    assert len(parameters) <= MOST_PARAMETERS, parameters


@pytest.mark.parametrize("function", [train_batch, BatchRun.__init__], ids=lambda each: each.__qualname__)
def test_beside_the_batch_no_parameter_is_a_bag_of_values(function: object) -> None:
    """Otherwise the parameters would only have another name."""
    hints = {name: hint for name, hint in get_type_hints(function).items() if name != "return"}
    assert PlannedBatch in hints.values()
    handed = {each for hint in hints.values() for each in (hint, *get_args(hint)) if is_dataclass(each)}
    sizes = {each.__name__: len(fields(each)) for each in handed if isinstance(each, type)}
    assert PlannedBatch.__name__ in sizes
    assert "Trackers" in sizes
    assert max(sizes.values()) < TOO_MANY_FIELDS, sizes

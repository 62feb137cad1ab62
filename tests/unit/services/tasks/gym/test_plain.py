"""What a generator knows of a task comes back as it was, with its types."""

from enum import Enum
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from gspo_services.tasks.gym.plain import as_json, from_json


class Colour(str, Enum):  # noqa: UP042 - as the package has its own
    RED = "red"


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, None, True, "ü"], "b": {}},
        {"numbers": (1, (2, 3)), "set": {"b", "a"}, "sets": {(1, 2)}},
        {(0, 1): "x", 7: "y", "z": {2: 3}},
        {"$": "tuple", "of": [1]},
        {"huge": 10**400, "half": Fraction(1, 2)},
        [frozenset({1, 2})],
    ],
)
def test_it_comes_back_with_its_types(value: Any) -> None:
    found = from_json(as_json(value))
    assert found == value
    assert kinds(found) == kinds(value)


def kinds(value: Any) -> Any:
    """The types of a value and of all in it. Sets that cannot change come back as sets that can."""
    if isinstance(value, dict):
        return {key: (type(key), kinds(each)) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [kinds(each) for each in value]
    return set if isinstance(value, frozenset) else type(value)


def test_numbers_of_numpy_are_pythons_and_arrays_stay() -> None:
    found = from_json(as_json({"n": np.int64(3), "x": np.float32(0.5), "a": np.array([[1, 2]], dtype=np.int8)}))
    assert (found["n"], type(found["n"]), found["x"]) == (3, int, 0.5)
    assert found["a"].dtype == np.int8
    assert found["a"].tolist() == [[1, 2]]


def test_an_enumeration_of_text_is_text() -> None:
    assert from_json(as_json([Colour.RED])) == ["red"]


def test_sets_have_one_form() -> None:
    assert as_json({"ab", "cd", "ef"}) == as_json({"ef", "cd", "ab"})


def test_what_has_no_form_is_named() -> None:
    with pytest.raises(TypeError, match=r"builtins\.complex has no form"):
        as_json({"z": 1j})

"""Outputs and results that say the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_services.tasks.environments.programs.comparison import same_output, same_value


@pytest.mark.parametrize(
    ("expected", "actual", "same"),
    [
        ("3\n", "3", True),
        ("a b \n c\n\n", "a b\nc", True),
        ("1 2 3", "1\n2\n3\n", True),
        ("1.5", "1.50", True),
        ("1.5", "1.5000001", True),
        ("1.5", "1.51", False),
        ("1000000.0", "1000000.5", True),
        ("0.0001", "0.0002", False),
        ("3", "3.0", True),
        ("3", "3.0000001", False),
        ("10000000000000001", "10000000000000002", False),
        ("1e3", "1000", True),
        ("yes", "Yes", False),
        ("1 2", "1 2 3", False),
        ("", "\n", True),
        ("", "0", False),
        ("0.0", "nan", False),
        ("nan", "nan", True),
        ("1", "1_0", False),
        ("1", "1e999999", False),
        ("1.0", "99e999999", False),
        ("-9e999999", "9e999999", False),
        ("9e999999", "9e999999", True),
        ("0.5", "1e-999999", False),
        ("1.0", "sNaN", False),
        ("0.0", "1" * 5000, False),
        ("1.5", "99e999999", False),
        ("1e-999999", "-99e999999", False),
        ("99e999999", "99.0e999999", True),
        ("99e999999", "98e999999", False),
    ],
)
def test_outputs_are_compared_by_lines_then_tokens_then_numbers(expected: str, actual: str, same: bool) -> None:
    assert same_output(expected, actual, 1e-6) is same


def test_without_a_tolerance_numbers_may_only_be_written_otherwise() -> None:
    assert same_output("0.50 2", "0.5 2.0", 0.0)
    assert not same_output("0.5", "0.5000000001", 0.0)


@pytest.mark.parametrize(
    ("expected", "actual", "same"),
    [
        ([1, 2.5], [1, 2.5000001], True),
        ([1, 2], [2, 1], False),
        (1, True, False),
        (True, True, True),
        (1.0, True, False),
        (2.0, 2, True),
        (2, 2.0, True),
        (2, 2.0000001, False),
        (1.5, 10**400, False),
        (10**400, 1.5, False),
        (float("inf"), 10**400, False),
        (1.5, float("nan"), False),
        ({"a": [1.5]}, {"a": [1.5000001]}, True),
        ({"a": 1}, {"b": 1}, False),
        ("1", 1, False),
        (1.5, float("inf"), False),
        (float("inf"), 1.5, False),
        (float("inf"), float("inf"), True),
        (None, None, True),
    ],
)
def test_results_of_functions_have_the_same_values(expected: object, actual: object, same: bool) -> None:
    assert same_value(expected, actual, 1e-6) is same


numbers = st.from_regex(r"[+-]?[0-9]{1,30}(\.[0-9]{0,30})?(e[+-]?[0-9]{1,6})?", fullmatch=True)
plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just(10**400)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=8,
)


@given(st.one_of(numbers, st.text()), st.one_of(numbers, st.text()))
def test_whatever_is_printed_is_the_expected_output_or_not(expected: str, actual: str) -> None:
    assert same_output(expected, actual, 1e-6) in (True, False)
    assert same_output(expected, expected, 1e-6)


@given(plain, plain)
def test_whatever_is_returned_is_the_expected_result_or_not(expected: object, actual: object) -> None:
    assert same_value(expected, actual, 1e-6) in (True, False)

"""The calculator's evaluator: right within its bounds, and a reason outside them."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_services.tasks.environments.expression import MAX_EXPRESSION_CHARS, evaluate

NUMBERS = st.integers(0, 99).map(lambda n: (str(n), Fraction(n)))


def combine(parts: tuple[tuple[str, Fraction], str, tuple[str, Fraction]]) -> tuple[str, Fraction]:
    (left, left_value), operator, (right, right_value) = parts
    value = {"+": left_value + right_value, "-": left_value - right_value, "*": left_value * right_value}[operator]
    return f"({left}{operator}{right})", value


EXPRESSIONS = st.recursive(
    NUMBERS, lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(combine), max_leaves=6
).filter(lambda pair: len(pair[0]) <= MAX_EXPRESSION_CHARS)


@settings(deadline=None)
@given(EXPRESSIONS)
def test_brackets_and_operators_give_the_value_computed_by_hand(pair: tuple[str, Fraction]) -> None:
    text, value = pair
    assert evaluate(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2+3*4", 14),
        ("(2+3)*4", 20),
        ("8/2/2", 2),
        ("-3-4", -7),
        ("10-4-3", 3),
        (" 12 * 7 ", 84),
        ("2--3", 5),
        ("007", 7),
        ("-(2+3)*-2", 10),
    ],
)
def test_precedence_is_that_of_arithmetic(text: str, value: int) -> None:
    assert evaluate(text) == value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "missing at the end"),
        ("__import__('os')", "only digits"),
        ("٣+1", "only digits"),
        ("9**9**9**9", '"*" where a number should be'),
        ("1//2", '"/" where a number should be'),
        ("1/0", "division by zero"),
        ("7/2", "does not come out even"),
        ("1(2)", '"(" where an operator'),
        ("1 2", '"2" where an operator'),
        ("+3", '"+" where a number'),
        ("1+", "missing at the end"),
        ("()", '")" where a number'),
        ("(1", "not closed"),
        ("1)", '")" where an operator'),
        ("9" * 40, "too large"),
        ("99999999*99999999", "too large"),
        ("(" * 60 + "1", "not closed"),
        ("1+" * 40 + "1", "longer than"),
    ],
)
def test_anything_else_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError) as refusal:
        evaluate(text)
    assert reason in str(refusal.value)


@settings(deadline=None)
@given(st.text(alphabet="0123456789+-*/() ", max_size=80))
def test_any_text_of_the_alphabet_has_a_value_or_a_reason(text: str) -> None:
    try:
        value = evaluate(text)
    except ValueError:
        return
    assert abs(value) <= 10**15

"""What a verifier evaluates of an answer cannot reach the right answer, a file, or a function that works the answer out."""

import ast
import math
import sys
from types import ModuleType

import pytest
import sympy

from gspo_services.tasks.gym.evaluating import algebra, arithmetic, evaluates, guarding, is_guarded, size

x = sympy.Symbol("x")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("6*(98 - 54) - 34 - 66", 164), (" -3 + 4\n", 1), ("8/(3 - 8/3)", 24), ("(3)*(\n5)", 15), ("2**3 // 3 % 2", 0),
        ("3.5 * 2", 7), ("3!", 6),
    ],
)  # fmt: skip
def test_arithmetic_has_its_value(text: str, value: float) -> None:
    assert float(arithmetic(text)) == value


@pytest.mark.parametrize(
    "text",
    [
        "", "0x64", "1e2", "1_00", "len([1])", "E", "x", "__import__('os')", "3 == 3", "3 < 4", "[1]", "1, 2", "1 # 2",
        '"24"', "1;2", "2 and 3", "()\u212f",
    ],
)  # fmt: skip
def test_what_is_no_arithmetic_is_not_evaluated(text: str) -> None:
    with pytest.raises(ValueError, match="it is no arithmetic"):
        arithmetic(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("x**2/2 + K", x**2 / 2 + sympy.Symbol("K")), ("-2*x*log(x**3) + 6*x", -2 * x * sympy.log(x**3) + 6 * x),
        ("\n ln(abs(x)) ", sympy.log(sympy.Abs(x))), ("1.5*x**(3/2)", sympy.Float(1.5) * x ** sympy.Rational(3, 2)),
        ("Rational(1, 3)*x", x / 3), ("exp(x)*(sin(x) - cos(x))", sympy.exp(x) * (sympy.sin(x) - sympy.cos(x))),
    ],
)  # fmt: skip
def test_algebra_has_its_value(text: str, value: sympy.Expr) -> None:
    assert algebra(text, local_dict={"x": x}) == value


@pytest.mark.parametrize(
    "text",
    [
        "integrate(x, x)", "Integral(x, x)", "expand((x + 1)**2)", "sympify(1)", "__import__('os')", "x.diff()", "'x'",
        "[x][0]", "(lambda: x)()", "log(x)(x)", "exp(x, evaluate=False)", "globals()", "x if x else x", "x == x", "f'{x}'",
        "eval(x)", "sqrt(*x)", "{x}", "x; x", "x := 1", "(x := 1)", "not x", "getattr(x, x)", "chr(97)",
    ],
)  # fmt: skip
def test_what_is_no_algebra_is_not_evaluated(text: str) -> None:
    with pytest.raises((ValueError, SyntaxError), match=r"which is no algebra here|invalid syntax"):
        algebra(text)


def test_a_size_is_a_finite_number() -> None:
    assert (size(-3), size(3 + 4j)) == (3, 5)
    for value in (math.nan, -math.inf, complex(math.nan, 1)):
        with pytest.raises(ValueError, match="it is"):
            size(value)


def test_only_while_it_scores_a_verifier_finds_another_function_under_the_name() -> None:
    module = ModuleType("a_verifier")
    sys.modules["a_verifier"] = module
    former = sympy.parse_expr
    try:
        with guarding("n_queens", "a_verifier"):
            assert vars(module)["eval"] is ast.literal_eval
        assert "eval" not in vars(module)
        with guarding("simple_integration", "a_verifier"):
            assert sympy.parse_expr is algebra
        with pytest.raises(ValueError, match="no algebra"), guarding("simple_integration", "a_verifier"):
            sympy.parse_expr("x.diff()")
        assert sympy.parse_expr is former
        with guarding("ab", "a_verifier"):
            assert "eval" not in vars(module)
    finally:
        del sys.modules["a_verifier"]


def test_a_verifier_that_evaluates_is_noticed() -> None:
    assert evaluates(lambda answer: eval(answer))
    assert evaluates(lambda answer: sympy.parse_expr(answer))
    assert not evaluates(lambda answer: float(answer))
    assert (is_guarded("countdown"), is_guarded("ab")) == (True, False)

"""The scores in tests/support/files/public_forms.py are those of the scorers that others publish."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from math_verify import parse, verify

from tests.support.files.public_forms import FORMS

pytestmark = pytest.mark.parity


def by_math_verify(gold: str, text: str) -> float:
    """As its own page recommends."""
    return float(verify(parse(f"\\boxed{{{gold}}}"), parse(text)))


def by_trl(gold: str, text: str) -> float:
    from trl.rewards import accuracy_reward

    (score,) = accuracy_reward(completions=[[{"role": "assistant", "content": text}]], solution=[f"${gold}$"])
    assert score is not None
    return float(score)


SCORERS: dict[str, Callable[[str, str], float]] = {"math-verify": by_math_verify, "trl": by_trl}


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.scorer in SCORERS])
def test_a_form_is_scored_as_its_own_scorer_does(name: str) -> None:
    form = FORMS[name]
    for row, text, score in form.answers():
        assert SCORERS[form.scorer](form.gold(row), text) == score, (row, text)

"""The loss agrees with the oracle of docs/gspo.md, with every option alone and in pairs, in any split of the step."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.loss.option_cases import (
    ALONE_AND_IN_PAIRS,
    EPISODES,
    OPTIONS,
    PROXIMAL,
    Case,
    fast_loss,
    objective_of,
    random_case,
    without_actions,
)
from tests.support.loss.oracle import OracleResult

TOLERANCE = 1e-12


def agrees(names: tuple[str, ...], case: Case, expected: OracleResult, parts: list[list[int]]) -> None:
    actual = fast_loss(objective_of(names), case, parts)
    assert actual.loss == pytest.approx(expected.loss, rel=TOLERANCE, abs=TOLERANCE), f"loss in parts {parts}"
    for what in ("by_logprob", "by_entropy"):
        rows = zip(getattr(actual, what), getattr(expected, what), strict=True)
        for i, (row, expected_row) in enumerate(rows):
            assert row == pytest.approx(expected_row, rel=TOLERANCE, abs=TOLERANCE), f"{what}, sequence {i}, parts {parts}"


@pytest.mark.parametrize("names", ALONE_AND_IN_PAIRS, ids=lambda names: " and ".join(names) or "defaults")
@given(choices=st.randoms(use_true_random=False))
@settings(max_examples=12, deadline=None)
def test_the_loss_is_the_oracles_alone_and_in_pairs(names: tuple[str, ...], choices: Random) -> None:
    case = random_case(choices, objective_of(names), episodes=EPISODES in names)
    expected = case.oracle(objective_of(names))
    members = list(range(len(case.sequences)))
    agrees(names, case, expected, [members])
    cut = choices.randint(0, len(members))
    agrees(names, case, expected, [part for part in (members[cut:], members[:cut]) if part])


@pytest.mark.parametrize("name", OPTIONS)
def test_a_step_without_action_tokens_is_zero_with_a_live_graph(name: str) -> None:
    objective = objective_of((name,))
    case = without_actions(random_case(Random(3), objective, episodes=name == EPISODES))
    result = fast_loss(objective, case, [list(range(len(case.sequences)))])
    assert result.loss == 0.0
    assert not any(g for rows in (result.by_logprob, result.by_entropy) for row in rows for g in row)


def test_the_random_steps_are_clipped_on_both_sides_and_weighted() -> None:
    """An option says nothing about a case that it never meets."""
    high = low = weighted = capped = 0.0
    for seed, name in product(range(100), ((), (PROXIMAL,))):
        objective = objective_of(name)
        case = random_case(Random(seed), objective, episodes=False)
        (output,) = fast_loss(objective, case, [list(range(len(case.sequences)))]).outputs
        if not name:
            high += output.stats.clipped_high_S.sum().item()
            low += output.stats.clipped_low_S.sum().item()
        weighted += (output.stats.weight_S != 1.0).sum().item()
        capped += (output.stats.weight_S == objective.tis_cap).sum().item()
    assert min(high, low, capped) > 10
    assert weighted > 100

"""The library has every property of ``properties`` and ``properties_of_parts``, on steps of any structure."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.loss.gspo_copies import GSPO
from tests.support.loss.loss_cases import pack, random_step
from tests.support.loss.properties import PROPERTIES
from tests.unit.gspo.conformance.properties import UNITS, Property


@pytest.mark.parametrize("holds", PROPERTIES, ids=lambda holds: holds.__name__)
@given(choices=st.randoms(use_true_random=False))
@settings(max_examples=20, deadline=None)
def test_the_library_conforms(holds: Property, choices: Random) -> None:
    holds(GSPO, random_step(choices))


def test_the_random_steps_reach_both_bounds_every_lag_sign_and_kind_of_row() -> None:
    """A property says nothing about a case that it never meets."""
    steps = [random_step(Random(seed)) for seed in range(200)]
    sequences = [s for step in steps for s in step.sequences]
    assert any(not s.mask for s in sequences)
    assert any(s.mask and not any(s.mask) for s in sequences)
    assert any(max(s.turns, default=0) > 1 for s in sequences)
    assert {s.lag == 0 for s in sequences} == {True, False}
    assert {len({g for g in step.groups if step.groups.count(g) == 1}) > 0 for step in steps} == {True, False}
    for unit in UNITS:
        stats = [step.loss(pack(step.sequences), unit, GSPO).stats for step in steps]
        for column in ("clipped_high_S", "clipped_low_S"):
            share = sum(getattr(s, column).sum().item() for s in stats) / len(sequences)
            assert 0.05 < share < 0.45

"""The named property catches each planted bug, and the unchanged copy has every property."""

from __future__ import annotations

from random import Random

import pytest

from tests.support.loss.gspo_copies import GSPO, Gspo, copy_of_gspo, source_of
from tests.support.loss.loss_cases import Step, random_step
from tests.support.loss.properties import PROPERTIES
from tests.unit.gspo.conformance.planted_bugs import BUGS_OF_THE_LOSS, PlantedBug
from tests.unit.gspo.conformance.planted_bugs_of_parts import BUGS_OF_PARTS
from tests.unit.gspo.conformance.properties import Property

BUGS = BUGS_OF_THE_LOSS + BUGS_OF_PARTS

STEPS: tuple[Step, ...] = tuple(random_step(Random(seed)) for seed in range(20))


def holds_on_every_step(holds: Property, copy: Gspo, steps: tuple[Step, ...] = STEPS) -> None:
    for step in steps:
        holds(copy, step)


def test_an_unchanged_copy_is_another_package_with_every_property() -> None:
    copy = copy_of_gspo({})
    assert copy.loss is not GSPO.loss
    assert copy.loss.segment_mean is not GSPO.loss.segment_mean
    for holds in PROPERTIES:
        holds_on_every_step(holds, copy, STEPS[:5])


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_planted_bug_is_caught(bug: PlantedBug) -> None:
    source = source_of(bug.file)
    assert source.count(bug.right) == 1, f"{bug.right!r} occurs {source.count(bug.right)} times in gspo/{bug.file}"
    mutant = copy_of_gspo({bug.file: source.replace(bug.right, bug.wrong)})
    with pytest.raises(AssertionError):
        holds_on_every_step(bug.caught_by, mutant)


def test_every_property_catches_a_bug_but_the_order_of_sequences() -> None:
    """That one follows from the formula; no single place in the library depends on it alone."""
    without = {holds.__name__ for holds in PROPERTIES} - {bug.caught_by.__name__ for bug in BUGS}
    assert without == {"the_order_of_sequences_does_not_matter"}
    assert len({bug.name for bug in BUGS}) == len(BUGS)

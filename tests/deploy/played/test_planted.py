"""`gspo check --kubernetes` finds what people do wrong, says where it is, and has nothing against our own manifests."""

from collections.abc import Callable
from fnmatch import fnmatchcase

import pytest

from gspo_services.prepare.cluster_check import CHECKS, Check, ClusterFault, ClusterModel
from tests.deploy.cluster import Cluster
from tests.deploy.conftest import VARIANTS
from tests.deploy.mistakes import MISTAKES
from tests.deploy.object_mistakes import OBJECT_MISTAKES
from tests.deploy.played.disagreeing import DISAGREEING
from tests.deploy.played.faults import faults
from tests.deploy.played.planted import PLANTED as SINGLE

PLANTED = SINGLE | DISAGREEING
pytestmark = pytest.mark.deploy
FOUND_OF_THE_OTHERS = 74
"""Of the mistakes that the repository's own checks find, so many are found for users, too. The rest are matters of style and
of files that only the repository has."""


def place(fault: ClusterFault) -> str:
    return f"{fault.item['kind']}/{fault.item['metadata']['name']} {fault.field}"


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_is_found_in_what_is_right(variant: str, cluster: Callable[[str], Cluster]) -> None:
    assert [f"{place(fault)}: {fault.text}" for fault in faults(cluster(variant).objects)] == []


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_found_in_its_field(name: str, cluster: Callable[[str], Cluster]) -> None:
    planted = PLANTED[name]
    objects = cluster(planted.variant)
    planted.make(objects)
    found = faults(objects.objects)
    wanted = planted.place.replace("[", "[[]")
    there = [fault.text for fault in found if fnmatchcase(place(fault), wanted)]
    assert any(planted.says in text for text in there), [f"{place(fault)}: {fault.text}" for fault in found]
    assert all(fault.way_out for fault in found)


def test_most_of_the_other_mistakes_are_found_too(cluster: Callable[[str], Cluster]) -> None:
    missed = []
    for name, mistake in MISTAKES.items():
        objects = cluster(mistake.variant)
        mistake.make(objects)
        if not faults(objects.objects):
            missed.append(name)
    assert len(MISTAKES) - len(missed) >= FOUND_OF_THE_OTHERS, missed
    assert len(MISTAKES) > len(OBJECT_MISTAKES) > 40


def test_every_check_finds_something(cluster: Callable[[str], Cluster]) -> None:
    useless = {check.__name__: check for check in CHECKS}
    for planted in [*PLANTED.values(), *MISTAKES.values()]:
        objects = cluster(planted.variant)
        planted.make(objects)
        model = ClusterModel.of(objects.objects)
        useless = {name: check for name, check in useless.items() if not _finds(check, model)}
    assert useless == {}


def _finds(check: Check, model: ClusterModel) -> bool:
    """Whether it finds anything; objects that no API server would take may end it early."""
    try:
        return bool(list(check(model)))
    except (AttributeError, KeyError, TypeError):
        return False

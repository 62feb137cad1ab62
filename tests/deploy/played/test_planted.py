"""`gspo check --kubernetes` finds what people do wrong, says where it is, and has nothing against our own manifests."""

from collections.abc import Callable
from fnmatch import fnmatchcase

import pytest

from gspo_services.prepare.cluster_check import CHECKS, Check, ClusterFault, ClusterModel
from tests.deploy.cluster import Cluster
from tests.deploy.conftest import VARIANTS
from tests.deploy.played.disagreeing import DISAGREEING
from tests.deploy.played.faults import faults, resources
from tests.deploy.played.objects import OBJECTS
from tests.deploy.played.planted import PLANTED as CLUSTERS
from tests.deploy.played.programs import PROGRAMS

PLANTED = CLUSTERS | DISAGREEING | OBJECTS | PROGRAMS
pytestmark = pytest.mark.deploy


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


def test_every_check_finds_something(cluster: Callable[[str], Cluster]) -> None:
    useless = {check.__name__: check for check in CHECKS}
    for planted in PLANTED.values():
        objects = cluster(planted.variant)
        planted.make(objects)
        model = ClusterModel.of([*objects.objects, *resources()])
        useless = {name: check for name, check in useless.items() if not _finds(check, model)}
    assert useless == {}
    assert len(PLANTED) == len(CLUSTERS) + len(DISAGREEING) + len(OBJECTS) + len(PROGRAMS) > 140


def _finds(check: Check, model: ClusterModel) -> bool:
    """Whether it finds anything; objects that no API server would take may end it early."""
    try:
        return bool(list(check(model)))
    except (AttributeError, KeyError, TypeError):
        return False

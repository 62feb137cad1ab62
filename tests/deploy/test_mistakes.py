"""Mistakes that people make, planted one at a time: its own check finds each."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.deploy.checks import CHECKS
from tests.deploy.cluster import Cluster, render
from tests.deploy.conftest import copy_manifests
from tests.deploy.kustomizations import FILE, lost_patches
from tests.deploy.mistakes import MISTAKES

pytestmark = pytest.mark.deploy


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_by_its_check(name: str, cluster: Callable[[str], Cluster]) -> None:
    mistake = MISTAKES[name]
    objects = cluster(mistake.variant)
    check = CHECKS[mistake.check]
    assert list(check(objects)) == []
    mistake.make(objects)
    found = list(check(objects))
    assert any(mistake.says in finding for finding in found), found


def test_every_check_has_found_a_mistake() -> None:
    assert {mistake.check for mistake in MISTAKES.values()} == set(CHECKS)


def test_a_patch_without_a_target_is_found(tmp_path: Path) -> None:
    """kustomize itself does not report it."""
    k8s = copy_manifests(tmp_path)
    overlay = k8s / "overlays" / "cpu" / FILE
    content = yaml.safe_load(overlay.read_text())
    patch = {"patch": '[{"op": "remove", "path": "/spec/replicas"}]', "target": {"kind": "Deployment", "name": "rollouts"}}
    content["patches"].append(patch)
    overlay.write_text(yaml.safe_dump(content))
    (found,) = lost_patches(overlay.parent, render(overlay.parent))
    assert re.search(r"cpu: .*'rollouts'.* not there", found)

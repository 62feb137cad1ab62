"""Every overlay passes every check, alone and with the components that it offers."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from gspo_services.prepare.cluster_check import ClusterModel, faults_of
from tests.deploy.cluster import Cluster, Object, render
from tests.deploy.conftest import GPU_OVERLAYS, VARIANTS, Pairs, copy_manifests
from tests.deploy.kustomizations import FILE, lost_patches

pytestmark = pytest.mark.deploy
Rendered = Callable[[str], tuple[Path, list[Object]]]


@pytest.mark.parametrize("variant", VARIANTS)
def test_pods_can_do_no_more_than_they_need(variant: str, cluster: Callable[[str], Cluster]) -> None:
    """Beyond the restricted standard, which `gspo check` knows."""
    wrong = []
    for pods in cluster(variant).pods:
        spec, volumes = pods.spec, pods.spec["volumes"]
        mounted = {mount["name"] for each in pods.containers for mount in each["volumeMounts"]}
        wrong += [
            (pods.name, what)
            for what, right in {
                "no token of the API server": spec.get("automountServiceAccountToken") is False,
                "nothing of the host": not any(key.startswith("host") for key in spec)
                and not any("hostPath" in each for each in volumes),
                "a process that is not number 1, which ignores SIGTERM": spec.get("shareProcessNamespace") is True,
                "bounded directories": all(each["emptyDir"].get("sizeLimit") for each in volumes if "emptyDir" in each),
                "only volumes that it mounts": {each["name"] for each in volumes} <= mounted,
                "a read-only root": all(each["securityContext"]["readOnlyRootFilesystem"] for each in pods.containers),
                "its part of the node's disk": all(
                    "ephemeral-storage" in each["resources"]["requests"] for each in pods.containers
                ),
            }.items()
            if not right
        ]
    assert wrong == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_patch_is_lost(variant: str, rendered: Rendered) -> None:
    directory, objects = rendered(variant)
    assert list(lost_patches(directory, objects)) == []


@pytest.mark.parametrize("overlay", GPU_OVERLAYS)
def test_every_pair_of_components_goes_together_in_the_order_of_the_guide(
    overlay: str, paired: Pairs, manifests: Path
) -> None:
    found = {}
    shared = [item for part in ("priorities", "monitoring", "kueue") for item in render(manifests / "cluster" / part)]
    for pair, (directory, objects) in paired(overlay).items():
        model = ClusterModel.of([*objects, *shared])
        wrong = [fault.text for fault in faults_of(model) if fault.status == "fail"]
        wrong += lost_patches(directory, objects)
        if wrong:
            found[pair] = wrong
    assert len(paired(overlay)) > 80
    assert found == {}


def test_a_changed_configuration_restarts_its_readers(rendered: Rendered, manifests: Path) -> None:
    """The ConfigMap's name follows its content, and every reader follows the name, also in a LeaderWorkerSet."""
    for variant in ("cpu", "qwen3-30b-a3b-lws"):
        _, objects = rendered(variant)
        (name,) = (
            item["metadata"]["name"] for item in objects if item["kind"] == "ConfigMap" and "run.toml" in item["data"]
        )
        assert name.startswith("gspo-run-")
        readers = [p for p in Cluster(objects).pods if p.role not in ("model-download", "tools")]
        assert [p.volume("config")["configMap"]["name"] for p in readers] == [name] * len(readers)
        assert len(readers) >= 3


def test_images_have_the_version_of_the_package(rendered: Rendered) -> None:
    from importlib.metadata import version

    for variant in ("cpu", "single-gpu-node", "qwen3-30b-a3b"):
        for made in Cluster(rendered(variant)[1]).pods:
            for container in made.containers:
                assert container["image"].rpartition(":")[2] == version("gspo"), (variant, container["image"])


def test_keys_that_were_not_made_stop_the_deployment(tmp_path: Path) -> None:
    k8s = copy_manifests(tmp_path)
    shutil.rmtree(k8s / "components" / "keys" / "files")
    with pytest.raises(subprocess.CalledProcessError) as refused:
        render(k8s / "overlays" / "single-gpu-node")
    assert os.path.join("keys", "files", "broker.secret") in refused.value.stderr


def test_a_patch_without_a_target_is_found(tmp_path: Path) -> None:
    """kustomize itself does not report it."""
    overlay = copy_manifests(tmp_path) / "overlays" / "cpu" / FILE
    content = yaml.safe_load(overlay.read_text())
    patch = {"patch": '[{"op": "remove", "path": "/spec/replicas"}]', "target": {"kind": "Deployment", "name": "rollouts"}}
    content["patches"].append(patch)
    overlay.write_text(yaml.safe_dump(content))
    (found,) = lost_patches(overlay.parent, render(overlay.parent))
    assert re.search(r"cpu: .*'rollouts'.* not there", found)

"""What these tests need of the machine, and a run on it. ``make test-pods``."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.deploy.cluster import K8S, Cluster, render
from tests.deploy.conftest import copy_manifests
from tests.deploy.kustomizations import FILE
from tests.pods.container import REPOSITORY
from tests.pods.node import Node

NUM_BATCHES = 14
"""Length of the run with two nodes."""
TOOLS = ("kubectl", "ip", "nft", "unshare", "setpriv", "chroot")


@pytest.fixture(scope="session")
def model() -> Path:
    """The model that the pods' init containers would make; ``make test-pods`` makes it once."""
    path = REPOSITORY / "models" / "tiny"
    assert (path / "config.json").is_file(), f"no model at {path}: make test-pods makes it"
    return path


@pytest.fixture
def plain() -> Cluster:
    """The unchanged overlay ``cpu``: NetworkPolicies, no keys."""
    return Cluster(render(K8S / "overlays" / "cpu"))


@pytest.fixture
def secured(tmp_path: Path) -> Cluster:
    """The overlay ``cpu`` with the component ``keys``, and keys as ``gspo keys`` makes them."""
    k8s = copy_manifests(tmp_path / "manifests")
    kustomization = k8s / "overlays" / "cpu" / FILE
    content = yaml.safe_load(kustomization.read_text())
    content.setdefault("components", []).append("../../components/keys")
    kustomization.write_text(yaml.safe_dump(content))
    cluster = Cluster(render(k8s / "overlays" / "cpu"))
    use_keys(cluster)
    return cluster


@pytest.fixture
def two_nodes(tmp_path: Path) -> Cluster:
    """The overlay ``cpu`` with the component ``learner-nodes``: a learner of two ranks, a short run that saves often."""
    k8s = copy_manifests(tmp_path / "manifests")
    kustomization = k8s / "overlays" / "cpu" / FILE
    content = yaml.safe_load(kustomization.read_text())
    content["components"] = ["../../components/learner-nodes"]
    kustomization.write_text(yaml.safe_dump(content))
    cluster = Cluster(render(k8s / "overlays" / "cpu"))
    for name, value in {
        "num_batches = 60": f"num_batches = {NUM_BATCHES}",
        "groups_per_batch = 32": "groups_per_batch = 8",
        "every_batches = 5\nnum_tasks = 128": f"every_batches = {NUM_BATCHES}\nnum_tasks = 8",
        "checkpoint_every_batches = 5": "checkpoint_every_batches = 2",
        "[learner]\n": '[learner]\nnum_nodes = 2\nrendezvous_address = "learner-0.learner:29500"\n',
    }.items():
        edit(cluster, name, value)
    # The overlay's pods make the model themselves; the component expects it on a claim.
    volumes = cluster.role("learner-worker").template["spec"]["volumes"]
    volumes[:] = [volume if volume["name"] != "model" else {"name": "model", "emptyDir": {}} for volume in volumes]
    return cluster


def edit(cluster: Cluster, old: str, new: str) -> None:
    """Change run.toml."""
    for item in cluster.of_kind("ConfigMap"):
        assert old in item["data"]["run.toml"], old
        item["data"]["run.toml"] = item["data"]["run.toml"].replace(old, new)


def use_keys(cluster: Cluster) -> None:
    """Edit run.toml as a user would."""
    edit(cluster, "allow_plaintext = true", 'keys = "/etc/gspo/keys"')


def needs_a_machine_for_pods(tmp_path: Path) -> None:
    """Skip where this machine cannot run pods; let an unprivileged user enter the directories above ``tmp_path``."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if os.geteuid() or missing:
        pytest.skip(f"needs root and {', '.join(missing or TOOLS)}: network namespaces, mounts")
    for directory in (tmp_path, *tmp_path.parents):
        if directory.stat().st_uid == os.geteuid() and directory != Path("/"):
            directory.chmod(directory.stat().st_mode | 0o711)


@pytest.fixture
def start_node(tmp_path: Path, model: Path) -> Callable[[Cluster], Node]:
    """A function that makes a node for a cluster's objects; enter it with ``with``."""
    needs_a_machine_for_pods(tmp_path)
    return lambda cluster: Node(cluster, tmp_path / "node", model)

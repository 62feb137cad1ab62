"""Every combination of overlay and components that the manifests support, rendered once."""

import re
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
import yaml

from gspo_services.prepare.init.command import main
from gspo_services.shared.net.security import KEY_ROLES, write_key_pair
from tests.deploy.cluster import K8S, Cluster, Object, copy_of, render
from tests.deploy.kustomizations import FILE

VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "cpu": ("overlays/cpu", ()),
    "cpu-monitored": ("overlays/cpu", ("monitoring", "autoscaling-hpa")),
    "cpu-openshift": ("overlays/cpu", ("tools", "private-registry", "openshift")),
    "own": ("overlays/own", ()),
    "single-gpu-node-reachable": ("overlays/single-gpu-node", ("reachable",)),
    "another-run-scaled": ("overlays/another-run", ("monitoring", "autoscaling-keda")),
    "cpu-sandbox": ("overlays/cpu", ("sandbox",)),
    "cpu-standby": ("overlays/cpu", ("standby-broker",)),
    "single-gpu-node": ("overlays/single-gpu-node", ()),
    "single-gpu-node-scaled": ("overlays/single-gpu-node", ("peer-weights", "monitoring", "autoscaling-keda", "spot")),
    "qwen3-30b-a3b": ("overlays/qwen3-30b-a3b", ()),
    "qwen3-30b-a3b-full": ("overlays/qwen3-30b-a3b", ("rdma", "spot", "peer-weights", "monitoring", "autoscaling-hpa")),
    "single-gpu-node-guarded": (
        "overlays/single-gpu-node",
        (
            "tools",
            "egress",
            "private-registry",
            "kueue",
            "standby-broker",
            "rdma",
            "reachable",
            "spot",
            "sandbox",
            "peer-weights",
            "monitoring",
        ),
    ),
    "qwen3-30b-a3b-guarded": ("overlays/qwen3-30b-a3b", ("openshift", "private-registry", "sandbox", "rdma")),
    "qwen3-30b-a3b-lws-guarded": (
        "overlays/qwen3-30b-a3b",
        ("openshift", "private-registry", "kueue", "learner-lws", "rdma-lws", "peer-weights"),
    ),
    "qwen3-30b-a3b-lws": ("overlays/qwen3-30b-a3b", ("learner-lws", "rdma-lws", "kueue", "monitoring", "autoscaling-keda")),
}
"""By variant: the overlay, and the components added to its own, in the guide's order; learner-lws replaces learner-nodes."""
GUIDE = K8S.parents[1] / "docs" / "guide" / "kubernetes.md"
SHARED: dict[str, str] = {"monitoring": "monitoring", "kueue": "kueue"}
"""By component: the directory of cluster/ that it needs beside cluster/priorities, which every run needs."""
BY_HAND: dict[str, Object] = {
    "sandbox": {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "gspo-sandbox", "namespace": "gspo"},
        "type": "Opaque", "data": {"key": "a2V5"}},
    "standby-broker": {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "gspo-database", "namespace": "gspo"},
        "type": "Opaque", "data": {"database": "cG9zdGdyZXNxbDovL2dzcG9AZGIvcnVucw==", "password": "cHc="}},
}  # fmt: skip
"""By component: what `kubectl create` has made, as the component says."""


def write_variant(k8s: Path, name: str) -> Path:
    """The directory of a variant in a copy of deploy/k8s: that of the overlay, or a new one with additional components."""
    overlay, extra = VARIANTS[name]
    if not extra:
        return k8s / overlay
    return write_with(k8s, overlay, extra, name)


def write_with(k8s: Path, overlay: str, extra: Sequence[str], name: str) -> Path:
    """A new overlay: ``overlay`` with more components, all of them in the order of the guide's table."""
    directory = k8s / "overlays" / name
    shutil.copytree(k8s / overlay, directory)
    content = yaml.safe_load((directory / FILE).read_text())
    components = {*content.get("components", []), *(f"../../components/{component}" for component in extra)}
    if "learner-lws" in extra:
        components.discard("../../components/learner-nodes")
    content["components"] = sorted(components, key=lambda path: guide_order().index(path.rpartition("/")[2]))
    (directory / FILE).write_text(yaml.safe_dump(content))
    return directory


@cache
def guide_order() -> list[str]:
    """The components in the order that the guide gives, with an overlay's own sizes where it says."""
    table = GUIDE.read_text().partition("### Components")[2].partition("Without `keys`")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    names = [name for row in rows for name in re.findall(r"`([\w-]+)`", row)]
    names.insert(names.index("learner-nodes"), "sizes")
    return names


def shared_by_runs(k8s: Path, name: str) -> list[Object]:
    """What a variant's cluster has already: the objects that all runs share."""
    wanted = ["priorities", *(SHARED[component] for component in VARIANTS[name][1] if component in SHARED)]
    by_hand = [BY_HAND[component] for component in VARIANTS[name][1] if component in BY_HAND]
    return [*by_hand, *(item for part in wanted for item in render(k8s / "cluster" / part))]


def copy_manifests(to: Path) -> Path:
    """Copy deploy/, add keys as ``gspo keys`` makes them, and an overlay ``own`` as ``gspo init`` does. Returns the copy's
    deploy/k8s.
    """
    shutil.copytree(K8S.parent, to / "deploy")
    k8s = to / "deploy" / "k8s"
    for role in KEY_ROLES:
        write_key_pair(k8s / "components" / "keys" / "files", role, overwrite=True)
    init(k8s / "overlays" / "own", "--kind", "reward")
    return k8s


def init(directory: Path, *words: str) -> None:
    """A project for a cluster, in ``directory``, with the manifests above it."""
    assert main([str(directory), "--hardware", "kubernetes", "--defaults", *words]) == 0


@pytest.fixture(scope="session")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_manifests(tmp_path_factory.mktemp("manifests"))


@pytest.fixture(scope="session")
def rendered(manifests: Path) -> Callable[[str], tuple[Path, list[Object]]]:
    """A function that returns directory and objects of a variant, with what its cluster has; each is rendered once."""
    cache: dict[str, tuple[Path, list[Object]]] = {}

    def get(name: str) -> tuple[Path, list[Object]]:
        if name not in cache:
            directory = write_variant(manifests, name)
            cache[name] = directory, [*render(directory), *shared_by_runs(manifests, name)]
        return cache[name]

    return get


PAIRED = (
    "tools", "egress",
    "private-registry", "openshift", "kueue", "standby-broker", "learner-lws", "rdma", "rdma-lws", "one-node", "reachable",
    "spot", "sandbox", "peer-weights", "monitoring", "autoscaling-keda", "autoscaling-hpa",
)  # fmt: skip
APART = (
    {"autoscaling-keda", "autoscaling-hpa"}, {"learner-lws", "rdma"}, {"learner-lws", "one-node"},
)  # fmt: skip
"""Pairs that exclude each other: two autoscalers; StatefulSets' RDMA and a LeaderWorkerSet; two nodes on one."""
GPU_OVERLAYS = ("single-gpu-node", "qwen3-30b-a3b")
Pairs = Callable[[str], dict[tuple[str, str], tuple[Path, list[Object]]]]


def goes_together(overlay: str, pair: tuple[str, str]) -> bool:
    several = overlay == "qwen3-30b-a3b"
    alone = "rdma-lws" in pair and "learner-lws" not in pair
    wrong_nodes = "one-node" in pair if several else "learner-lws" in pair
    queue_of_several = "kueue" in pair and several and "learner-lws" not in pair
    return not (set(pair) in APART or alone or wrong_nodes or queue_of_several)


@pytest.fixture(scope="session")
def paired(manifests: Path) -> Pairs:
    """A function that returns directory and objects of an overlay with each pair of components that go together."""

    @cache
    def get(overlay: str) -> dict[tuple[str, str], tuple[Path, list[Object]]]:
        found = {}
        for pair in combinations(PAIRED, 2):
            if goes_together(overlay, pair):
                directory = write_with(manifests, f"overlays/{overlay}", pair, f"pair-{overlay}-{'-'.join(pair)}")
                found[pair] = directory, [*render(directory), *(BY_HAND[name] for name in pair if name in BY_HAND)]
        return found

    return get


@pytest.fixture
def cluster(rendered: Callable[[str], tuple[Path, list[Object]]]) -> Callable[[str], Cluster]:
    """A function that returns a copy of a variant's objects, which the test may change."""
    return lambda name: Cluster(copy_of(rendered(name)[1]))


@pytest.fixture
def site(tmp_path: Path) -> list[Object]:
    """The overlay ``rollouts-elsewhere`` with its keys, as its header says."""
    overlay = copy_manifests(tmp_path / "site") / "overlays" / "rollouts-elsewhere"
    for name in ("broker", "learner", "rollout-paris"):
        write_key_pair(overlay / "files", name, overwrite=True)
        if name != "rollout-paris":
            (overlay / "files" / f"{name}.secret").unlink()
    return render(overlay)

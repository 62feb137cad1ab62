"""Several brokers of one run: each pod is one of them, and peers reach each by its own name."""

import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from gspo_services.prepare.cluster_check import faults_of
from gspo_services.prepare.cluster_check.model import read_manifests
from tests.deploy.cluster import K8S, Cluster, Object, matches, render
from tests.deploy.edits import container, edit_config
from tests.deploy.kustomizations import FILE, lost_patches

pytestmark = pytest.mark.deploy
OWN = 'endpoint = "tcp://broker-{broker}.broker:'


@pytest.fixture(scope="module")
def shared_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Object]]:
    """The overlay cpu with the component, and run.toml as its comment says."""
    k8s = tmp_path_factory.mktemp("brokers") / "k8s"
    shutil.copytree(K8S, k8s)
    directory = k8s / "overlays" / "cpu"
    run = (k8s / "base" / "run.toml").read_text()
    run = run.replace("[broker]\n", "[broker]\nnum_brokers = 2\n").replace('endpoint = "tcp://broker:', OWN)
    assert run.count(OWN) == 2
    (directory / "run.toml").write_text(run)
    content = yaml.safe_load((directory / FILE).read_text())
    content["components"] = ["../../components/tools", "../../components/several-brokers"]
    content["configMapGenerator"] = [{"name": "gspo-run", "behavior": "replace", "files": ["run.toml"]}]
    (directory / FILE).write_text(yaml.safe_dump(content))
    return directory, [*render(directory), *render(k8s / "cluster" / "priorities")]


def faults(objects: list[Object], tmp_path: Path) -> list[str]:
    (tmp_path / "rendered.yaml").write_text(yaml.safe_dump_all(objects))
    return [fault.text for fault in faults_of(read_manifests(tmp_path)) if fault.status == "fail"]


def test_the_component_passes_every_check(shared_run: tuple[Path, list[Object]], tmp_path: Path) -> None:
    directory, objects = shared_run
    assert list(lost_patches(directory, objects)) == []
    assert faults(objects, tmp_path) == []


def test_tools_have_every_brokers_volume_and_brokers_reach_each_other(shared_run: tuple[Path, list[Object]]) -> None:
    cluster = Cluster(shared_run[1])
    tools, broker = cluster.role("tools"), cluster.role("broker")
    claims = {tools.mount(f"/var/lib/{name}/run")["persistentVolumeClaim"]["claimName"] for name in ("gspo", "gspo-1")}
    assert claims == {f"run-broker-{index}" for index in broker.indices}
    policy = cluster.one("NetworkPolicy", "brokers")["spec"]
    for direction, side in (("ingress", "from"), ("egress", "to")):
        (rule,) = policy[direction]
        assert [matches(peer["podSelector"], broker.labels) for peer in rule[side]] == [True]
        assert rule["ports"] == [{"port": "batch"}]


def broker_arguments(cluster: Cluster, **changes: Any) -> None:
    container(cluster, "broker").update(changes)


MISTAKES: dict[str, tuple[str, Callable[[Cluster], object]]] = {
    "three pods of two brokers": (
        "3 pods of the broker, and broker.num_brokers is 2",
        lambda c: c.one("StatefulSet", "broker")["spec"].update(replicas=3),
    ),
    "pods that are all broker 0": (
        "pod broker-1 is broker 0 of 2, and 1 is its place",
        lambda c: broker_arguments(c, args=["broker", "/etc/gspo/config/run.toml"]),
    ),
    "peers that reach one of them by chance": (
        "broker.work_endpoint of broker 0 is tcp://broker:7001, and broker is no name of StatefulSet/broker: broker-0.",
        lambda c: edit_config(c, "tcp://broker-{broker}.broker:7001", "tcp://broker:7001"),
    ),
    "names of pods that there are not": (
        "broker.batch_endpoint of broker 0 is tcp://broker-01.broker:7002",
        lambda c: edit_config(c, "tcp://broker-{broker}.broker:7002", "tcp://broker-{broker}1.broker:7002"),
    ),
    "two pods of a run of one broker": (
        "2 brokers: each has a ledger of its own, and peers reach one or another by chance",
        lambda c: edit_config(c, "num_brokers = 2", "num_brokers = 1"),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name: str, shared_run: tuple[Path, list[Object]], tmp_path: Path) -> None:
    says, make = MISTAKES[name]
    objects = deepcopy(shared_run[1])
    make(Cluster(objects))
    found = faults(objects, tmp_path)
    assert any(text.startswith(says) for text in found), found

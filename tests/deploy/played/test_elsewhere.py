"""Rollouts in another cluster: what the site has, what it must not have, and what the run's home lets in."""

from collections.abc import Callable

import pytest

from gspo_services.shared.settings import run_fingerprint
from gspo_services.shared.settings.configuration import load_settings
from tests.deploy.cluster import K8S, Cluster, Object, title
from tests.deploy.played.faults import faults

pytestmark = pytest.mark.deploy


def test_a_site_can_work_and_has_only_rollouts_and_their_model(site: list[Object]) -> None:
    assert [f"{title(fault.item)} {fault.field}: {fault.text}" for fault in faults(site)] == []
    assert {pods.role for pods in Cluster(site).pods} == {"rollout", "model-download"}
    assert [title(item) for item in site if item["kind"] in ("Service", "StatefulSet")] == []


def test_a_site_has_its_own_key_and_no_other_secret(site: list[Object]) -> None:
    secrets = {name for item in site if item["kind"] == "Secret" for name in item["data"]}
    assert secrets == {"rollout.secret", "rollout-paris.public", "broker.public", "learner.public"}
    (rollouts,) = (pods for pods in Cluster(site).pods if pods.role == "rollout")
    # The key rollout-paris admits the peers rollout-paris-..., and a pod begins with its Deployment's name.
    assert rollouts.owner["metadata"]["name"] == "rollout-paris"
    assert rollouts.main["args"][-2:] == ["--name", "$(POD_NAME)"]


def test_a_site_takes_part_in_the_run_of_its_home(site: list[Object]) -> None:
    (rollouts,) = (pods for pods in Cluster(site).pods if pods.role == "rollout")
    settings = Cluster(site).settings(rollouts)
    home = load_settings(K8S / "overlays" / "single-gpu-node" / "run.toml", environment={})
    assert run_fingerprint(settings) == run_fingerprint(home)
    assert settings.broker.work_endpoint == "tcp://broker.example.com:7001"
    assert (K8S / "overlays/rollouts-elsewhere/run.toml").read_text() == (
        K8S / "overlays/single-gpu-node/run.toml"
    ).read_text()


def test_the_home_lets_others_in_at_two_ports_only(cluster: Callable[[str], Cluster]) -> None:
    objects = cluster("single-gpu-node-reachable")
    outside = [item for item in objects.of_kind("Service") if item["spec"].get("type") == "LoadBalancer"]
    assert {(item["metadata"]["name"], port["port"]) for item in outside for port in item["spec"]["ports"]} == {
        ("broker-outside", 7001), ("learner-outside", 7003),
    }  # fmt: skip
    open_to_all = [
        (policy["metadata"]["name"], port["port"])
        for policy in objects.of_kind("NetworkPolicy")
        for rule in policy["spec"].get("ingress", [])
        if any("ipBlock" in peer for peer in rule["from"])
        for port in rule["ports"]
    ]
    assert sorted(open_to_all) == [("broker-outside", "work"), ("learner-outside", "weights")]

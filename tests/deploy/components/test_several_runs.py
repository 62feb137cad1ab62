"""Runs side by side on one cluster: what one of them has, brings along and takes with it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from deploy.monitoring.generate import prometheus_rule
from tests.deploy.cluster import K8S, Cluster, Object, render, title, walk
from tests.deploy.conftest import VARIANTS
from tests.deploy.played.faults import faults

pytestmark = pytest.mark.deploy
CLUSTER_SCOPED = ("Namespace", "PriorityClass", "ResourceFlavor", "ClusterQueue")
Rendered = Callable[[str], tuple[Path, list[Object]]]


def test_a_run_in_another_namespace_names_the_first_one_nowhere(rendered: Rendered) -> None:
    directory, _ = rendered("another-run-scaled")
    objects = render(directory)
    assert {item["metadata"].get("namespace", "gspo-another") for item in objects} == {"gspo-another"}
    assert [item["metadata"]["name"] for item in objects if item["kind"] == "Namespace"] == ["gspo-another"]
    (query,) = (value for path, value in walk(Cluster(objects).one("ScaledObject", "rollout")) if path.endswith("/query"))
    assert query == 'max(gspo_rollouts_wanted{namespace="gspo-another"})'
    # Names and labels call it "gspo"; no field that names a namespace does.
    named = [path for item in objects for path, value in walk(item) if value == "gspo" and "namespace" in path.lower()]
    assert named == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_owns_nothing_outside_of_its_namespace(variant: str, rendered: Rendered, manifests: Path) -> None:
    """Deleting a run deletes only what is its own."""
    directory, _ = rendered(variant)
    own = [item for item in render(directory) if item["kind"] in CLUSTER_SCOPED or "namespace" not in item["metadata"]]
    assert [title(item) for item in own] == [f"Namespace/{own[0]['metadata']['name']}"]


def test_a_namespace_without_cluster_rights_is_enough(cluster: Callable[[str], Cluster]) -> None:
    """As the guide says: no Namespace, and no priority classes."""
    objects = cluster("cpu")
    objects.objects[:] = [item for item in objects.objects if item["kind"] not in CLUSTER_SCOPED]
    for pods in objects.pods:
        del pods.template["spec"]["priorityClassName"]
    assert [fault.text for fault in faults(objects.objects)] == []


def test_what_runs_share_is_applied_apart_and_is_there_once() -> None:
    shared = [item for part in sorted((K8S / "cluster").iterdir()) for item in render(part)]
    assert {title(item) for item in shared} >= {
        "PriorityClass/gspo-core", "PriorityClass/gspo-rollout", "PrometheusRule/gspo", "ClusterQueue/gspo-learners",
    }  # fmt: skip


def test_alerts_tell_runs_apart() -> None:
    """Every alert's answer has the namespace of its run, so that one run's broker does not hide that another has none."""
    (rules,) = (item for item in render(K8S / "cluster" / "monitoring") if item["kind"] == "PrometheusRule")
    expressions = [rule["expr"] for group in rules["spec"]["groups"] for rule in group["rules"]]
    assert len(expressions) > 30
    assert [text for text in expressions if "absent(" in text] == []
    assert [text for text in expressions if "up{" in text.replace('up{job="gspo"', "")] == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_pod_that_crashes_gets_a_mended_configuration(variant: str, cluster: Callable[[str], Cluster]) -> None:
    """With OrderedReady a StatefulSet waits for its broken pod to become ready before it replaces it."""
    sets = cluster(variant).of_kind("StatefulSet")
    assert {item["spec"].get("podManagementPolicy") for item in sets} == {"Parallel"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_blocks_another_apply(variant: str, cluster: Callable[[str], Cluster]) -> None:
    """A Job's template cannot be changed: a new image or model would be refused as long as it exists."""
    objects = cluster(variant)
    assert objects.of_kind("Job", "Pod") == []
    # What is set here is set back by every apply.
    assert "replicas" not in objects.one("Deployment", "rollout")["spec"]


def test_runbooks_have_whole_addresses_where_one_is_given() -> None:
    rule = yaml.safe_load(prometheus_rule("https://git.example.com/gspo/blob/main/"))
    alerts = [each for group in rule["spec"]["groups"] for each in group["rules"] if "alert" in each]
    assert alerts
    for alert in alerts:
        base, path = alert["annotations"]["runbook_url"].split("main/")
        assert base == "https://git.example.com/gspo/blob/"
        assert (K8S.parents[1] / path.partition("#")[0]).is_file()

"""The Helm chart installs what kustomize renders: rendered by Helm itself, as a library, without a cluster."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.helm.generate import ANNOTATION, ChartError, chart_of, write_chart
from tests.deploy.cluster import Object, render, title, walk

pytestmark = pytest.mark.deploy
Rendered = Callable[[str], tuple[Path, list[Object]]]
VARIANTS = ("cpu", "single-gpu-node-scaled", "qwen3-30b-a3b", "qwen3-30b-a3b-lws")


def helm() -> Any:
    """The library is there for these tests alone (requirements/deploy.txt), and pytest reads this file in others, too."""
    return import_module("helm_python")


def installed(chart: Path, namespace: str, values: Object | None = None) -> dict[str, Object]:
    """By title: the objects that `helm install` would send."""
    texts = helm().Chart.load(chart).render(values or {}, name="gspo", namespace=namespace)
    found = [item for path, text in texts.items() if path.endswith(".yaml") for item in yaml.safe_load_all(text) if item]
    return {title(item): item for item in found}


def plain(objects: list[Object]) -> dict[str, Object]:
    """By title: a kustomization's objects as the chart has them. The ConfigMap's name has no hash."""
    (hashed,) = (item["metadata"]["name"] for item in objects if "run.toml" in (item.get("data") or {}))
    inside = [item for item in objects if item["kind"] != "Namespace"]
    found = yaml.safe_load(yaml.safe_dump(inside).replace(hashed, "gspo-run"))
    return {title(item): item for item in found}


def without_additions(item: Object) -> Object:
    """The chart's own annotation, and the list of pull secrets that is empty unless asked for, taken out."""
    for _, node in list(walk(item)):
        if isinstance(node, dict) and ANNOTATION in node.get("annotations", {}):
            del node["annotations"][ANNOTATION]
            if not node["annotations"]:
                del node["annotations"]
        if isinstance(node, dict) and node.get("imagePullSecrets") == []:
            del node["imagePullSecrets"]
    return item


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_chart_installs_what_kustomize_renders(variant: str, rendered: Rendered, tmp_path: Path) -> None:
    directory, _ = rendered(variant)
    objects = render(directory)
    write_chart(chart_of(objects, "gspo", "0.1.0"), tmp_path / "gspo")
    found = installed(tmp_path / "gspo", "gspo")
    assert {name: without_additions(item) for name, item in found.items()} == plain(objects)
    assert len(found) >= 12


@pytest.fixture
def chart(rendered: Rendered, tmp_path: Path) -> Path:
    directory, _ = rendered("single-gpu-node-scaled")
    write_chart(chart_of(render(directory), "gspo", "0.1.0"), tmp_path / "gspo")
    return tmp_path / "gspo"


def test_helm_has_nothing_against_the_chart(chart: Path) -> None:
    report = helm().lint(chart)
    assert [each for each in report["messages"] if each["severity"] > 1] == []
    assert report["total_charts_linted"] == 1


def test_a_second_release_is_a_run_in_its_own_namespace(chart: Path) -> None:
    found = installed(chart, "another")
    assert {item["metadata"]["namespace"] for item in found.values()} == {"another"}
    (query,) = (value for path, value in walk(found["ScaledObject/rollout"]) if path.endswith("/query"))
    assert query == 'max(gspo_rollouts_wanted{namespace="another"})'


def test_values_change_images_configuration_and_pull_secrets(chart: Path) -> None:
    config = '[run]\nnum_batches = 3 # {{ not a template }}\n"quoted" = "ü"\n'
    first = installed(chart, "gspo")
    image = "r.example.com/gspo-rollout@sha256:" + "a" * 64
    values = {"config": config, "images": {"rollout": image}, "pullSecrets": [{"name": "r"}]}
    found = installed(chart, "gspo", values)
    assert found["ConfigMap/gspo-run"]["data"]["run.toml"] == config
    pods = found["Deployment/rollout"]["spec"]["template"]
    assert pods["spec"]["containers"][0]["image"] == image
    assert pods["spec"]["imagePullSecrets"] == [{"name": "r"}]
    assert "registry.example.com/gspo-broker" in str(found["StatefulSet/broker"]), "values that are not given stay"
    before = first["Deployment/rollout"]["spec"]["template"]["metadata"]["annotations"][ANNOTATION]
    assert pods["metadata"]["annotations"][ANNOTATION] != before, "a changed configuration restarts the pods"


def test_what_has_no_run_is_refused() -> None:
    with pytest.raises(ChartError, match=r"0 ConfigMaps have run\.toml: render an overlay"):
        chart_of([], "gspo", "0.1.0")

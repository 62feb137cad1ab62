"""deploy/k8s, as far as it can be checked without rendering it."""

import re
from pathlib import Path

import pytest
import yaml

from gspo_services.shared.net.security import KEY_ROLES
from gspo_services.shared.settings.configuration import load_settings
from tests.deploy.cluster import K8S
from tests.deploy.kustomizations import FILE, files_of, parts, read
from tests.deploy.metrics import metric_names

ROOT = K8S.parents[1]
KEYS = K8S / "components" / "keys"
SITE = K8S / "overlays" / "rollouts-elsewhere"
DIRECTORIES = sorted(path.parent for path in K8S.rglob(FILE))
CONFIGS = sorted(K8S.rglob("run.toml"))


def test_there_are_overlays_and_configurations_to_check() -> None:
    assert {"base", "cpu", "single-gpu-node", "qwen3-30b-a3b", "learner-lws"} <= {path.name for path in DIRECTORIES}
    assert len(CONFIGS) == 4


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.parent.name)
def test_gspo_check_accepts_every_configuration(path: Path) -> None:
    settings = load_settings(path, environment={})
    assert settings.security.metrics_host == "0.0.0.0"
    assert bool(settings.security.keys) != settings.security.allow_plaintext


@pytest.mark.parametrize("directory", DIRECTORIES, ids=lambda path: path.name)
def test_every_file_is_named_by_its_kustomization_and_every_name_is_a_file(directory: Path) -> None:
    named = files_of(directory)
    made_later = {KEYS / "files" / name for role in KEY_ROLES for name in (f"{role}.secret", f"{role}.public")}
    made_later |= {path for path in named if path.parent == SITE / "files"}
    assert [path for path in sorted(named - made_later) if not path.exists()] == []
    there = {path for path in directory.iterdir() if path.is_file() and path.name not in (FILE, ".gitignore")}
    assert there - named == set()


def test_every_component_is_offered_by_an_overlay_or_the_docs() -> None:
    docs = (ROOT / "docs" / "guide" / "kubernetes.md").read_text()
    for component in sorted(path.name for path in (K8S / "components").iterdir()):
        assert f"`{component}`" in docs, component


def test_the_secrets_are_the_files_that_gspo_keys_makes() -> None:
    files = {Path(name).name for generator in read(KEYS)["secretGenerator"] for name in generator["files"]}
    # The operator's own secret key stays with the operator.
    assert files == {f"{role}.{kind}" for role in KEY_ROLES for kind in ("secret", "public")} - {"operator.secret"}
    secrets = [g["files"] for g in read(KEYS)["secretGenerator"] if any(name.endswith(".secret") for name in g["files"])]
    assert [len(names) for names in secrets] == [1, 1, 1]


def test_every_dashboard_is_deployed() -> None:
    monitoring = ROOT / "deploy" / "monitoring"
    assert monitoring in [*parts(K8S / "cluster" / "monitoring")]
    there = set((monitoring / "grafana").glob("*.json"))
    assert there
    assert there <= files_of(monitoring)
    # A ConfigMap may have 1 MiB, but kubectl apply keeps a copy of it in an annotation of at most 256 KiB.
    assert sum(path.stat().st_size for path in there) < 250_000


def test_overlays_set_the_namespace_of_their_components_objects() -> None:
    for overlay in (K8S / "overlays").iterdir():
        other = {"another-run": "gspo-another"}
        assert read(overlay)["namespace"] == other.get(overlay.name, read(K8S / "base")["namespace"])
        assert K8S / "base" in list(parts(overlay))
        assert read(overlay)["replacements"] == read(K8S / "overlays" / "cpu")["replacements"]


def test_both_autoscalers_use_the_same_query() -> None:
    scaled = yaml.safe_load((K8S / "components" / "autoscaling-keda" / "scaledobject.yaml").read_text())
    (trigger,) = scaled["spec"]["triggers"]
    hpa = yaml.safe_load((K8S / "components" / "autoscaling-hpa" / "hpa.yaml").read_text())
    (metric,) = hpa["spec"]["metrics"]
    assert trigger["metadata"]["query"] == f'max({metric["external"]["metric"]["name"]}{{namespace="gspo"}})'
    assert trigger["metricType"] == metric["external"]["target"]["type"]
    assert trigger["metadata"]["threshold"] == metric["external"]["target"]["averageValue"]
    assert hpa["spec"]["maxReplicas"] == scaled["spec"]["maxReplicaCount"]
    assert hpa["spec"]["minReplicas"] == scaled["spec"]["minReplicaCount"]
    assert hpa["spec"]["behavior"] == scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]


def test_metrics_in_the_docs_are_exported() -> None:
    text = (ROOT / "docs" / "guide" / "kubernetes.md").read_text()
    named = set(re.findall(r"\bgspo_[a-z0-9_]+", text.replace("gspo_broker_*", "")))
    assert len(named) >= 5
    assert named <= metric_names()

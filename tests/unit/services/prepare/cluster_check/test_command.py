"""`gspo check --kubernetes`: what it prints about files, and about files that are no manifests."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_services.cli.command_line import command_line
from gspo_services.prepare.check.command import main
from gspo_services.prepare.cluster_check import ClusterModel, faults_of, fields
from gspo_services.prepare.cluster_check.model import OTHER_COMMANDS

WITHOUT_SCHEMAS = "fields and their types were not checked: pip install kubernetes-validate"

RUN = """\
apiVersion: v1
kind: ConfigMap
metadata: {name: gspo-run, namespace: one}
data:
  run.toml: |
    [broker]
    work_endpoint = "tcp://broker:7001"
    batch_endpoint = "tcp://broker:7002"
    [security]
    metrics_host = "0.0.0.0"
    allow_plaintext = true
---
apiVersion: v1
kind: Service
metadata: {name: broker, namespace: one}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector: {app: broker}
  ports: [{name: work, port: 7001, targetPort: work}]
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: broker, namespace: one}
spec:
  replicas: 1
  serviceName: broker
  podManagementPolicy: Parallel
  selector: {matchLabels: {app: broker}}
  template:
    metadata: {labels: {app: broker}}
    spec:
      priorityClassName: gspo-core
      securityContext: {runAsNonRoot: true, runAsUser: 10001, fsGroup: 10001}
      tolerations: [{operator: Exists, effect: NoExecute, tolerationSeconds: 60}]
      containers:
        - name: broker
          image: gspo-broker:0.1.0
          args: [broker, /etc/gspo/config/run.toml, --set, run.directory=/var/lib/gspo]
          env: [{name: GSPO_BROKER__WORK_ENDPOINT, value: "tcp://0.0.0.0:7001"},
                {name: GSPO_BROKER__BATCH_ENDPOINT, value: "tcp://0.0.0.0:7002"}]
          ports: [{name: work, containerPort: 7001}]
          startupProbe: {httpGet: {path: /readyz, port: 9101}, failureThreshold: 300}
          livenessProbe: {httpGet: {path: /healthz, port: 9101}, failureThreshold: 4}
          resources: {limits: {memory: 1Gi}}
          volumeMounts: [{name: config, mountPath: /etc/gspo/config}, {name: run, mountPath: /var/lib/gspo}]
      volumes:
        - {name: config, configMap: {name: gspo-run}}
  volumeClaimTemplates: [{metadata: {name: run}, spec: {accessModes: [ReadWriteOnce]}}]
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: broker, namespace: one}
spec: {maxUnavailable: 0, selector: {matchLabels: {app: broker}}}
"""


@pytest.fixture
def rendered(tmp_path: Path) -> Path:
    (tmp_path / "all.yaml").write_text(RUN)
    return tmp_path


def checked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = main(words)
    said = capsys.readouterr()
    return status, said.out + said.err


def test_a_set_that_can_work_is_said_to(rendered: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = checked(capsys, "--kubernetes", str(rendered))
    said = said.replace(f"{WITHOUT_SCHEMAS}\n", "")
    assert (status, said) == (0, "4 objects, 1 kinds of pods: 0 failures, 0 warnings\n")


def test_schemas_that_are_not_installed_are_named(
    rendered: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fields, "_directory", lambda: None)
    status, said = checked(capsys, "--kubernetes", str(rendered))
    assert status == 0
    assert said.endswith(f"0 warnings\n{WITHOUT_SCHEMAS}\n")


def test_the_commands_that_pods_may_start_are_those_of_gspo() -> None:
    (commands,) = (each.choices for each in command_line()._actions if isinstance(each, argparse._SubParsersAction))
    assert set(commands) - {"broker", "rollout", "learner"} == OTHER_COMMANDS


def test_a_fault_has_file_line_object_field_and_way_out(rendered: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = rendered / "all.yaml"
    path.write_text(RUN.replace("args: [broker", "command: [broker"))
    (line,) = (number for number, text in enumerate(path.read_text().splitlines(), 1) if "command:" in text)
    status, said = checked(capsys, f"--kubernetes={rendered}")
    assert status == 1
    first = said.splitlines()[0]
    assert first == f"fail  all.yaml:{line}: StatefulSet/broker spec.template.spec.containers[0].command"
    assert "-> write args: [broker, /etc/gspo/config/run.toml" in said
    assert "it cannot work as it is\n" in said


def test_the_same_as_json(rendered: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (rendered / "all.yaml").write_text(RUN.replace("--set, run.directory", "--batch-size, run.directory"))
    status, said = checked(capsys, "--kubernetes", str(rendered), "--json")
    (found,) = json.loads(said)["findings"]
    assert status == 1
    assert found["object"] == "StatefulSet/broker"
    assert "unrecognized arguments: --batch-size" in found["text"]


def test_settings_are_those_of_the_configuration_and_the_container_together(
    rendered: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (rendered / "all.yaml").write_text(RUN.replace("[broker]\n", "[broker]\n    lease_seconds = 3\n"))
    status, said = checked(capsys, "--kubernetes", str(rendered))
    assert status == 1
    assert "ConfigMap/gspo-run data.run.toml" in said
    assert "broker.lease_seconds: unknown key" in said


def test_nodes_beside_the_manifests_are_the_clusters(rendered: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "small"}}
    nodes = {
        "apiVersion": "v1",
        "kind": "List",
        "items": [node | {"status": {"allocatable": {"cpu": "2", "memory": "512Mi"}}}],
    }
    (rendered / "nodes.yaml").write_text(yaml.safe_dump(nodes))
    status, said = checked(capsys, "--kubernetes", str(rendered))
    assert status == 1
    assert "needs 1 GiB of memory, and no node has that: small has 0.5 GiB" in said


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "is not YAML"),
        ("", "holds no Kubernetes object"),
        ("just text", "has no apiVersion and kind"),
        ("- 1\n- 2\n", "all.yaml:1: is no Kubernetes object"),
        ("apiVersion: !!python/name:os.system x\nkind: Pod\n", "is not YAML"),
    ],
)
def test_what_is_no_manifest_is_named(text: str, says: str, rendered: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (rendered / "all.yaml").write_text(text)
    status, said = checked(capsys, "--kubernetes", str(rendered))
    assert status == 2
    assert says in said


def test_a_kustomization_is_to_be_rendered_first(rendered: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (rendered / "kustomization.yaml").write_text("resources: [all.yaml]\n")
    status, said = checked(capsys, "--kubernetes", str(rendered))
    assert status == 2
    assert "kubectl kustomize" in said


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = checked(capsys, "--kubernetes", str(tmp_path / "nowhere"))
    assert status == 2
    assert "there is no such file or folder" in said


def values_in(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in the objects that holds a value."""
    for key, value in list(node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()):
        yield node, key
        yield from values_in(value)


ODD = st.one_of(
    st.none(), st.integers(-5, 5), st.booleans(), st.text(max_size=5), st.just([]), st.just({}), st.just([None, 1])
)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10_000), ODD)
def test_a_field_of_any_other_type_ends_nothing(number: int, value: object) -> None:
    """Objects that no API server would take are faults, and no tracebacks."""
    objects = list(yaml.safe_load_all(RUN))
    places = [place for item in objects for place in values_in(item)]
    holder, key = places[number % len(places)]
    holder[key] = value
    for fault in faults_of(ClusterModel.of(objects)):
        assert fault.text
        assert fault.way_out
        assert fault.field is not None

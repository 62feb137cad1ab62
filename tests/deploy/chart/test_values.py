"""One values file for Helm and for kustomize: the same objects, the same refusals."""

import contextlib
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.helm.chart import chart_of
from deploy.helm.generate import main, read_values, write_chart
from deploy.helm.values import Values, ValuesError, merged
from gspo_services.prepare.cluster_check import ClusterModel, faults_of
from tests.deploy.chart.installed import helm, installed, plain, without_annotation
from tests.deploy.cluster import Cluster, Object, render
from tests.deploy.played.faults import faults

pytestmark = pytest.mark.deploy
Made = Callable[[str], tuple[Path, Path, Values]]
VARIANTS = ("cpu", "another-run-scaled", "own", "single-gpu-node-guarded", "qwen3-30b-a3b", "qwen3-30b-a3b-lws")
TOLERATION = {"key": "dedicated", "operator": "Equal", "value": "gspo", "effect": "NoSchedule"}
OTHERS: dict[str, tuple[Any, Any]] = {
    "namespace": ("elsewhere", "team-7"),
    "registry": ("r.example.org:5000/team", ""),
    "repository": ("own/image", "other"),
    "tag": ("0.2.0", "0.2.1"),
    "own tag": ("mine", ""),
    "digest": ("", "sha256:" + "a1" * 32),
    "pull secrets": ([{"name": "login"}, {"name": "second"}], []),
    "priority": ("own-class", ""),
    "size": ("777Gi", 1024),
    "class": ("fast", "slow"),
    "modes": (["ReadWriteOncePod"], ["ReadWriteMany", "ReadOnlyMany"]),
    "claim": ("", "there-already"),
    "resources": (
        {"requests": {"cpu": 3}, "limits": {"memory": None, "example.com/gpu": 1}}, {"limits": {"memory": "9Gi"}},
    ),
    "selector": ({"pool": "gpu", "zone": "a"}, {"kubernetes.io/arch": "amd64"}),
    "tolerations": ([TOLERATION], None),
    "replicas": (3, 0),
    "unset replicas": (0, 5),
    "nodes": (3, 4),
    "hub name": ("own/model-1.5", ""),
    "files": ({"more.py": "x = '{{ 1 }}'\n"}, {"a.py": "a = 1\n\n\tb\n"}),
    "config": ('[run]\n"quoted" = "ü"  \n', "[run]\nnum_batches = 1\n"),
}  # fmt: skip
"""By kind: two values that no overlay has."""


def tree(values: dict[tuple[str, ...], Any]) -> Object:
    found: Object = {}
    for key, value in values.items():
        node = found
        for step in key[:-1]:
            node = node.setdefault(step, {})
        node[key[-1]] = value
    return found


def generated(*words: object) -> tuple[int, str]:
    """The status of the command, and what it said."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        status = main([str(word) for word in words])
    return status, said.getvalue()


def kustomized(overlay: Path, directory: Path, values: Object) -> list[Object]:
    """What the overlay of a values file renders."""
    file = directory.parent / f"{directory.name}.yaml"
    file.write_text(yaml.safe_dump(values, allow_unicode=True))
    assert generated(overlay, directory, "--values", file) == (0, "")
    return render(directory)


@pytest.fixture(scope="session")
def made(rendered: Callable[[str], tuple[Path, list[Object]]], tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A function that returns a variant's overlay, its chart and its values."""
    known: dict[str, tuple[Path, Path, Values]] = {}

    def get(variant: str) -> tuple[Path, Path, Values]:
        if variant not in known:
            overlay, chart = rendered(variant)[0], tmp_path_factory.mktemp("charts") / "gspo"
            objects = render(overlay)
            write_chart(chart_of(objects, "gspo", "0.1.0"), chart)
            known[variant] = overlay, chart, Values(objects)
        return known[variant]

    return get


@pytest.mark.parametrize("number", [None, 0, 1])
@pytest.mark.parametrize("variant", VARIANTS)
def test_helm_and_kustomize_make_the_same_objects(variant: str, number: int | None, made: Made, tmp_path: Path) -> None:
    overlay, chart, values = made(variant)
    given = {} if number is None else tree({key: OTHERS[kind][number] for key, kind in values.kinds.items()})
    found = kustomized(overlay, tmp_path / "mine", given)
    assert plain(found) == without_annotation(installed(chart, values.objects[-1]["metadata"]["namespace"], given))
    if number is None:
        assert plain(found) == plain(values.objects), "without changes it is the overlay"
    else:
        assert {item["metadata"]["namespace"] for item in found} == {given["namespace"]}


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_value_changes_something(variant: str, made: Made) -> None:
    values = made(variant)[2]
    before = [place.filled(values.defaults()) for place in values.places]
    for key, kind in values.kinds.items():
        given = [merged(values.defaults(), tree({key: other})) for other in OTHERS[kind]]
        after = [[place.filled(each) for place in values.places] for each in given]
        assert key == ("namespace",) or any(each != before for each in after), f"{key} changes nothing"
    assert len(values.kinds) > 25


MINE = """
namespace: mine
images: {registry: r.example.org, tag: 0.2.0, rollout: {tag: mine}, broker: {digest: "sha256:DIGEST"}}
imagePullSecrets: [{name: login}]
priorityClasses: {core: "", rollout: null}
storage:
  model: {existingClaim: models}
  learnerRun: {size: 3Ti, storageClassName: fast}
  run: {storageClassName: block, size: 20Gi}
rollout:
  replicas: 6
  resources: {requests: {nvidia.com/gpu: 4}, limits: {nvidia.com/gpu: 4}}
  nodeSelector: {pool: gpu}
learner: {nodes: 4, sharedMemory: 64Gi}
modelDownload: {model: Qwen/Qwen3-32B, replicas: 0}
""".replace("DIGEST", "a" * 64)


def test_a_values_file_says_what_a_run_is(made: Made, tmp_path: Path) -> None:
    overlay, _, _ = made("qwen3-30b-a3b")
    objects = Cluster(kustomized(overlay, tmp_path / "mine", yaml.safe_load(MINE)))
    rollout, learner, broker = (objects.role(name) for name in ("rollout", "learner", "broker"))
    assert [pods.main["image"] for pods in (rollout, learner, broker)] == [
        "r.example.org/gspo-rollout:mine", "r.example.org/gspo-learner:0.2.0",
        f"r.example.org/gspo-broker@sha256:{'a' * 64}",
    ]  # fmt: skip
    assert {json.dumps(pods.spec["imagePullSecrets"]) for pods in objects.pods} == {'[{"name": "login"}]'}
    assert not any("priorityClassName" in pods.spec for pods in objects.pods)
    assert [item["metadata"]["name"] for item in objects.of_kind("PersistentVolumeClaim")] == ["learner-run"]
    assert {pods.volume("model")["persistentVolumeClaim"]["claimName"] for pods in objects.pods} == {"models"}
    run = objects.one("PersistentVolumeClaim", "learner-run")["spec"]
    assert (run["storageClassName"], run["resources"]["requests"]["storage"]) == ("fast", "3Ti")
    ledger = broker.volume("run")["volumeClaimTemplate"]["spec"]
    assert (ledger["storageClassName"], ledger["resources"]["requests"]["storage"]) == ("block", "20Gi")
    assert (rollout.owner["spec"]["replicas"], rollout.spec["nodeSelector"]) == (6, {"pool": "gpu"})
    assert rollout.main["resources"]["limits"] == {"memory": "192Gi", "nvidia.com/gpu": 4}
    assert objects.one("StatefulSet", "learner-worker")["spec"]["replicas"] == 3
    assert learner.volume("shm")["emptyDir"]["sizeLimit"] == "64Gi"
    download = objects.one("Deployment", "model-download")["spec"]
    assert download["replicas"] == 0
    assert {"name": "MODEL", "value": "Qwen/Qwen3-32B"} in download["template"]["spec"]["initContainers"][0]["env"]
    assert {item["metadata"]["namespace"] for item in objects.objects} == {"mine"}


def test_who_has_only_a_namespace_can_apply_both(made: Made, tmp_path: Path) -> None:
    """No object of the cluster, and none that must be there, where the values name none."""
    overlay, chart, values = made("single-gpu-node-scaled")
    given = tree({key: "" for key, kind in values.kinds.items() if kind == "priority"})
    for objects in (kustomized(overlay, tmp_path / "mine", given), list(installed(chart, "team-7", given).values())):
        assert {"Namespace", "PriorityClass", "CustomResourceDefinition"}.isdisjoint(item["kind"] for item in objects)
        assert all(item["metadata"].get("namespace") for item in objects)
        assert [fault.text for fault in faults(objects) if "PriorityClass" in fault.text] == []


BAD = {
    "rollout: {replicas: '4'}": "rollout.replicas is '4': write a whole number",
    "rollout: {replica: 4}": "rollout.replica: there is no such value; there are nodeSelector, replicas, res",
    "image: {}": "image: there is no such value; there are broker, code, config, data, imagePull",
    "images: {tag: 0.1}": "images.tag is 0.1: write a string such as 0.1.0; with quotes where",
    "images: {registry: 'https://r.example.org'}": "images.registry is 'https://r.example.org': write host",
    "images: {broker: {digest: 'sha256:abc'}}": "images.broker.digest is 'sha256:abc': write sha256: and 64",
    "namespace: Gspo": "namespace is 'Gspo': write small letters, digits and dashes, 63 at most",
    f"namespace: {'a' * 64}": "63 at most",
    "storage: {learnerRun: {size: 2TB}}": "storage.learnerRun.size is '2TB': write a number with m, k",
    "storage: {run: {accessModes: [RWX]}}": "storage.run.accessModes.0 is 'RWX': write ",
    "storage: {run: {size: null}}": "storage.run.size: it has no value, and null removes",
    "broker: {resources: {limits: {memory: -1}}}": "broker.resources.limits.memory is -1: write a number",
    "rollout: {nodeSelector: {gpu: true}}": "rollout.nodeSelector.gpu is True: write a string: quote",
    "broker: {tolerations: [{key: a, effect: NoRun}]}": "broker.tolerations.0.effect is 'NoRun': write ",
    "broker: {tolerations: [{kye: a}]}": "broker.tolerations.0.kye: there is no such value; there are effect, ",
    "imagePullSecrets: registry": "imagePullSecrets is 'registry': write a list such as [{name: registry}]",
    "rollout: null": "rollout: it has no value, and null removes the default: write one",
    f"config: {'x' * ((1 << 20) + 1)}": "characters): write the text of run.toml, of 1 MiB at most",
    f"data: {{train.jsonl: {'x' * ((1 << 20) + 1)}}}": "characters): write a text of 1 MiB at most, which is what",
    "code: {../a.py: x}": "code is '../a.py': write the name of a file: letters",
    "[]": "the file is []",
}  # fmt: skip
"""By values file: what is said about it."""


@pytest.mark.parametrize("given", BAD, ids=lambda given: given[:60])
def test_a_wrong_value_is_named_before_anything_is_rendered(given: str, made: Made, tmp_path: Path) -> None:
    _, chart, values = made("own")
    file = tmp_path / "my.yaml"
    file.write_text(given)
    with pytest.raises(ValuesError, match=re.escape(BAD[given])) as caught:
        read_values(file, values)
    assert str(caught.value).startswith(f"{file}: ")
    if given != "[]":
        with pytest.raises(helm().HelmValuesError, match="specifications of the schema"):
            installed(chart, "gspo", yaml.safe_load(given))


RENDERED = {
    "{}": "images are of registry.example.com, which stands for your registry",
    "images: {registry: r.example.org, rollout: {tag: 0.3.0}}": "has the tag '0.3.0', and the others have '0.1.0'",
    "storage: {learnerRun: {size: 500Gi}}": "500 GiB are too small for Qwen3-30B-A3B: 3 checkpoints of it have about 1006",
    "storage: {model: {size: 50Gi}}": "50 GiB are too small for Qwen3-30B-A3B: its files have about 56 GiB",
    "storage: {learnerRun: {accessModes: [ReadWriteOnce]}}": "is ReadWriteOnce, a volume of one node, and the pods of",
    "modelDownload: {model: Qwen/Qwen3-8B}": "is not what Deployment/model-download downloads",
    "learner: {nodes: 4}": "num_nodes",
    "rollout: {resources: {requests: {nvidia.com/gpu: 4}}}": "devices need both, and equal",
    "config: '[run'": "ends with status 2: ",
    "priorityClasses: {core: mine}": "no PriorityClass mine",
}
"""By values that the schema takes: what `gspo check --kubernetes` says about the chart's objects."""


@pytest.mark.parametrize("given", RENDERED)
def test_a_value_that_fits_nothing_else_is_named_before_it_is_applied(given: str, made: Made) -> None:
    _, chart, _ = made("qwen3-30b-a3b")
    objects = list(installed(chart, "gspo", yaml.safe_load(given)).values())
    found = [fault.text for fault in faults_of(ClusterModel.of(objects))]
    assert any(RENDERED[given] in text for text in found), found


def test_the_check_has_nothing_against_a_chart_but_that_its_keys_are_missing(made: Made) -> None:
    """Helm's files come in another order than kustomize's objects."""
    found = faults(list(installed(made("qwen3-30b-a3b")[1], "gspo").values()))
    assert [fault.text for fault in found if not fault.text.startswith("security.keys /etc/gspo/keys has no ")] == []
    assert len(found) == 4


def test_a_download_that_does_not_run_need_not_fit(made: Made) -> None:
    given = {"modelDownload": {"model": "Qwen/Qwen3-8B", "replicas": 0}}
    objects = list(installed(made("qwen3-30b-a3b")[1], "gspo", given).values())
    assert [fault.text for fault in faults(objects) if "downloads" in fault.text] == []


def test_what_cannot_be_read_or_written_is_named(made: Made, tmp_path: Path) -> None:
    overlay, _, _ = made("cpu")
    file = tmp_path / "my.yaml"
    words = (overlay, tmp_path / "a", "--values", file)
    assert "my.yaml cannot be read as YAML: [Errno 2]" in generated(*words)[1]
    file.write_text("a: [")
    assert "my.yaml cannot be read as YAML: while parsing" in generated(*words)[1]
    file.write_text("tag: 1\nnamespace: Gspo")
    status, said = generated(*words)
    assert (status, said.count("my.yaml: "), (tmp_path / "a").exists()) == (2, 2, False)
    file.write_text("")
    before = (overlay / "kustomization.yaml").read_bytes()
    assert "was not written here: name another folder" in generated(overlay, overlay, "--values", file)[1]
    assert (overlay / "kustomization.yaml").read_bytes() == before
    assert "nowhere cannot be rendered: " in generated(tmp_path / "nowhere", tmp_path / "a")[1]


def test_objects_that_one_value_cannot_describe_are_refused(made: Made) -> None:
    objects = render(made("cpu")[0])
    for item in objects:
        if item["kind"] == "Deployment":
            item["spec"]["template"]["spec"]["imagePullSecrets"] = [{"name": "login"}]
    with pytest.raises(ValuesError, match=r"imagePullSecrets is \[.*\] in one object and \[.*\] in another"):
        Values(objects)

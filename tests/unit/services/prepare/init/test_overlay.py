"""``gspo init --hardware kubernetes``: an overlay that carries the project's own code and rows."""

import json
import os
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from gspo_services.prepare.init.command import main

MANIFESTS: Final = Path(__file__).parents[5] / "deploy" / "k8s"
WORDS: Final = ("--hardware", "kubernetes", "--defaults", "--manifests", str(MANIFESTS))


def begun(directory: Path, *words: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The kustomization and the configuration."""
    assert main([str(directory), *WORDS, *words]) == 0
    return yaml.safe_load((directory / "kustomization.yaml").read_text()), tomllib.loads(
        (directory / "run.toml").read_text()
    )


def generated(kustomization: dict[str, Any]) -> dict[str, list[str]]:
    return {each["name"]: each["files"] for each in kustomization["configMapGenerator"]}


@pytest.mark.parametrize(
    ("kind", "code", "data"),
    [
        ("reward", ["my_reward.py"], True), ("agent", ["my_agent.py"], True), ("environment", ["my_environment.py"], False),
        ("maths", [], True), ("code", [], True), ("reasoning_gym", [], False),
    ],
)  # fmt: skip
def test_each_kind_carries_what_it_has(kind: str, code: list[str], data: bool, tmp_path: Path) -> None:
    kustomization, run = begun(tmp_path / "p", "--kind", kind)
    files = generated(kustomization)
    assert (files.get("gspo-code", []), "gspo-data" in files) == (code, data)
    components = [os.path.basename(path) for path in kustomization["components"]]
    assert ("code" in components, "data" in components, "sandbox" in components) == (bool(code), data, kind == "code")
    named = [*kustomization["resources"], *kustomization["components"], *(name for each in files.values() for name in each)]
    assert [path for path in named if not (tmp_path / "p" / path).exists()] == []
    if data:
        assert paths(run) == ["/etc/gspo/data/train.jsonl", "/etc/gspo/data/eval.jsonl"]


def paths(run: dict[str, Any]) -> list[str]:
    return [run["environment"]["options"][name] for name in ("train_path", "eval_path")]


# 2200: more than a ConfigMap holds only with the held-out rows.
@pytest.mark.parametrize(("num_bytes", "where"), [(500, "/etc/gspo/data"), (2200, "/models/data"), (3000, "/models/data")])
def test_rows_that_no_configmap_holds_stay_on_the_volume(num_bytes: int, where: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"{n}?" + "x" * num_bytes, "answer": "1"}) + "\n" for n in range(500)))
    kustomization, run = begun(tmp_path / "p", "--data", str(rows))
    assert paths(run) == [f"{where}/train.jsonl", f"{where}/eval.jsonl"]
    assert ("gspo-data" in generated(kustomization)) == where.startswith("/etc")


def test_held_out_rows_of_the_users_own_are_carried_too(tmp_path: Path) -> None:
    for name, first in (("rows", 0), ("held", 50)):
        lines = [json.dumps({"question": f"{first + n}?", "answer": "1"}) for n in range(20)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    words = ("--data", str(tmp_path / "rows.jsonl"), "--eval-data", str(tmp_path / "held.jsonl"))
    kustomization, _ = begun(tmp_path / "p", *words)
    files = generated(kustomization)["gspo-data"]
    assert [len((tmp_path / "p" / name).read_text().splitlines()) for name in files] == [20, 20]


def test_an_overlay_names_all_that_a_run_on_gpus_needs(tmp_path: Path) -> None:
    kustomization, run = begun(tmp_path / "p", "--kind", "maths")
    base = os.path.relpath(MANIFESTS, tmp_path / "p")
    parts = ("gpu", "keys", "model-download", "data", "tools", "one-node")
    assert kustomization["namespace"] == "gspo"
    assert kustomization["resources"] == [f"{base}/base"]
    assert kustomization["components"] == [f"{base}/components/{name}" for name in parts]
    assert kustomization["patches"] == [{"path": "sizes.yaml"}]
    assert kustomization["configMapGenerator"][0] == {"name": "gspo-run", "behavior": "replace", "files": ["run.toml"]}
    assert kustomization["images"] == [
        {"name": name, "newName": f"registry.example.com/{name}", "newTag": version("gspo")}
        for name in ("gspo-broker", "gspo-rollout", "gspo-learner")
    ]
    assert run["security"]["keys"] == "/etc/gspo/keys"


def sizes(directory: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """By kind and name: what the overlay changes of each object."""
    documents = yaml.safe_load_all((directory / "sizes.yaml").read_text())
    return {(item["kind"], item["metadata"]["name"]): item["spec"] for item in documents}


@pytest.mark.parametrize(("gpus", "one_node"), [("8", True), ("16", False)])
def test_sizes_are_those_of_the_plan(gpus: str, one_node: bool, tmp_path: Path) -> None:
    kustomization, run = begun(tmp_path / "p", "--model", "Qwen/Qwen3-4B", "--gpus", gpus)
    found = sizes(tmp_path / "p")
    assert any(path.endswith("one-node") for path in kustomization["components"]) == one_node
    assert (found.get(("PersistentVolumeClaim", "model")) == {"accessModes": ["ReadWriteOnce"]}) == one_node
    for name in ("learner-run", "backups"):
        storage = found["PersistentVolumeClaim", name]["resources"]["requests"]["storage"]
        assert storage == f"{round(4e9 * 4 * 12 / 2**30)}Gi"
    (learner,) = found["StatefulSet", "learner"]["template"]["spec"]["containers"]
    assert {part["nvidia.com/gpu"] for part in learner["resources"].values()} == {str(run["learner"]["num_ranks"])}
    (download,) = found["Deployment", "model-download"]["template"]["spec"]["initContainers"]
    assert {each["name"]: each["value"] for each in download["env"]} == {"MODEL": "Qwen/Qwen3-4B", "DATASET": ""}


def test_a_model_that_is_on_no_hub_is_bound_by_hand(tmp_path: Path) -> None:
    kustomization, _ = begun(tmp_path / "p", "--model", "/models/ours-8B")
    assert "model.yaml" in kustomization["resources"]
    text = (tmp_path / "p" / "model.yaml").read_text()
    assert (yaml.safe_load(text)["metadata"]["name"], "/models/ours-8B" in text) == ("model", True)
    assert not any("model-download" in path for path in kustomization["components"])
    assert "model-download" not in (tmp_path / "p" / "sizes.yaml").read_text()


def test_without_manifests_the_way_out_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([str(tmp_path / "p"), "--hardware", "kubernetes", "--defaults"]) == 2
    assert "name that of a checkout of this project with --manifests DIR" in capsys.readouterr().err
    assert not (tmp_path / "p").exists()

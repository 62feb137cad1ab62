"""``gspo init --hardware kubernetes``: an overlay that carries the project's own code and rows."""

import json
import os
import tomllib
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
        ("maths", [], True), ("reasoning_gym", [], False),
    ],
)  # fmt: skip
def test_each_kind_carries_what_it_has(kind: str, code: list[str], data: bool, tmp_path: Path) -> None:
    kustomization, run = begun(tmp_path / "p", "--kind", kind)
    files = generated(kustomization)
    assert (files.get("gspo-code", []), "gspo-data" in files) == (code, data)
    components = [os.path.basename(path) for path in kustomization["components"]]
    assert ("code" in components, "data" in components) == (bool(code), data)
    named = [*kustomization["resources"], *kustomization["components"], *(name for each in files.values() for name in each)]
    assert [path for path in named if not (tmp_path / "p" / path).exists()] == []
    if data:
        assert run["environment"]["options"]["train_path"] == "/etc/gspo/data/train.jsonl"


@pytest.mark.parametrize(("num_bytes", "path"), [(500, "/etc/gspo/data/train.jsonl"), (3000, "/models/data/train.jsonl")])
def test_rows_that_no_configmap_holds_stay_on_the_volume(num_bytes: int, path: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"{n}?" + "x" * num_bytes, "answer": "1"}) + "\n" for n in range(500)))
    kustomization, run = begun(tmp_path / "p", "--data", str(rows))
    assert run["environment"]["options"]["train_path"] == path
    assert ("gspo-data" in generated(kustomization)) == path.startswith("/etc")


def test_a_model_that_is_on_no_hub_is_bound_by_hand(tmp_path: Path) -> None:
    kustomization, _ = begun(tmp_path / "p", "--model", "/models/ours-8B")
    assert "model.yaml" in kustomization["resources"]
    assert not any("model-download" in path for path in kustomization["components"])
    assert "model-download" not in (tmp_path / "p" / "sizes.yaml").read_text()


def test_without_manifests_the_way_out_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([str(tmp_path / "p"), "--hardware", "kubernetes", "--defaults"]) == 2
    assert "name that of a checkout of this project with --manifests DIR" in capsys.readouterr().err
    assert not (tmp_path / "p").exists()

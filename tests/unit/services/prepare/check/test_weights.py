"""Files that are whole and hold another model than config.json describes: named by their headers alone, and as they load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gspo.model.policy import load_policy
from gspo.model_files.folder import ModelFilesError
from tests.support.checking.projects import Project
from tests.support.policy.families import save_family

Files = dict[str, Tensor]
EXPERT = "model.layers.1.mlp.experts.3.down_proj.weight"


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the first, files are read range by range; the second is loaded by transformers."""
    directory: Path = tmp_path_factory.mktemp(request.param)
    save_family(directory, request.param)
    return directory


def an_expert_missing(files: Files) -> None:
    del files[EXPERT]


def an_expert_more(files: Files) -> None:
    files[EXPERT.replace(".3.", ".8.")] = files[EXPERT].clone()


def experts_twice(files: Files) -> None:
    files["model.layers.1.mlp.experts.down_proj"] = torch.zeros(8, 64, 32)


def experts_stacked_by_halves(files: Files) -> None:
    for name in [name for name in files if name.startswith("model.layers.1.mlp.experts.")]:
        del files[name]
    files["model.layers.1.mlp.experts.gate_up_proj"] = torch.zeros(4, 64, 64)
    files["model.layers.1.mlp.experts.down_proj"] = torch.zeros(4, 64, 32)


def a_norm_missing(files: Files) -> None:
    del files["model.layers.1.input_layernorm.weight"]


def a_layer_missing(files: Files) -> None:
    for name in [name for name in files if name.startswith("model.layers.1.")]:
        del files[name]


def a_bias_more(files: Files) -> None:
    files["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(64)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (an_expert_missing, f"layer 1 has no {EXPERT.removeprefix('model.layers.1.')}, and config.json describes 8 experts"),
        (an_expert_more, "layer 1 has mlp.experts.8.down_proj.weight, and config.json describes 8 experts"),
        (experts_twice, "layer 1 has experts both apart (mlp.experts.*.down_proj.weight) and stacked"),
        (experts_stacked_by_halves, "_proj [4, 64, "),
        (a_norm_missing, "the files "),
        (a_layer_missing, "nothing of layer 1, and config.json describes 2 layers"),
        (a_bias_more, "the files"),
    ],
)
def test_what_files_have_too_much_or_too_little_is_named(
    spoil: Callable[[Files], None], text: str, saved: Path, project: Project
) -> None:
    config = json.loads((saved / "config.json").read_text())
    project.configure_model(**config)
    files = load_file(saved / "model.safetensors")
    spoil(files)
    save_file(files, project.model / "model.safetensors", metadata={"format": "pt"})
    (found,) = [each for each in project.findings(code=False) if each.check == "weights"]
    assert (found.status, text in found.text) == ("fail", True), found.text
    assert found.way_out
    with pytest.raises(ModelFilesError, match=r"(another|different) model"):
        load_policy(project.model, torch.float32)


def test_a_layer_that_predicts_further_tokens_is_no_part_of_the_model(saved: Path, project: Project) -> None:
    project.configure_model(**json.loads((saved / "config.json").read_text()))
    files = load_file(saved / "model.safetensors")
    files |= {name.replace("layers.1.", "layers.2."): value.clone() for name, value in files.items() if "layers.1." in name}
    save_file(files, project.model / "model.safetensors", metadata={"format": "pt"})
    (found,) = [each for each in project.findings(code=False) if each.check == "weights"]
    assert found.status == "ok", found.text
    load_policy(project.model, torch.float32)

"""``gspo export`` of a run with adapters: the merged model, the adapters alone, and what is refused."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gspo.model.lora import LoraPlan, inject_lora, is_lora, lora_name, part_of
from gspo.model.serving import serving_weights
from gspo_services.runs.export.__main__ import export_command
from gspo_services.shared.settings.run_settings import write_run_settings
from gspo_services.shared.settings.sections import LoraSection, Model, Run, Settings
from tests.support.learner.tiny_model import reference_logprobs, save_tiny_model, tiny_qwen3_moe
from tests.support.runs.model_checkpoints import write_model_checkpoint

PLAN = LoraPlan(rank=2, alpha=4.0, target_modules=("attention", "experts"))


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("start") / "model"
    save_tiny_model(directory)
    return directory


@pytest.fixture(scope="module")
def trained() -> Any:
    """The starting model with adapters that have learnt something."""
    model = tiny_qwen3_moe()
    inject_lora(model, PLAN, seed=3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    return model


@pytest.fixture
def run(tmp_path: Path, start: Path, trained: Any) -> Path:
    directory = tmp_path / "run"
    directory.mkdir()
    lora = LoraSection(rank=2, alpha=4.0, target_modules=["attention", "experts"])
    write_run_settings(Settings(run=Run(directory=directory, num_batches=60), model=Model(path=start), lora=lora))
    write_model_checkpoint(directory, trained, 11, 10, plan=PLAN)
    return directory


def test_the_export_is_the_starting_model_with_the_adapters_merged(
    run: Path, tmp_path: Path, start: Path, trained: Any
) -> None:
    from transformers import AutoModelForCausalLM

    assert export_command([str(run), "--to", str(tmp_path / "model")]) == 0
    found, expected = load_file(tmp_path / "model" / "model.safetensors"), serving_weights(trained, gathered=nullcontext)
    assert all(torch.equal(found.pop(name), tensor) for name, tensor in expected)
    assert found == {}
    assert (tmp_path / "model" / "tokenizer.json").read_bytes() == (start / "tokenizer.json").read_bytes()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto").eval()
    ids = list(range(20, 60))
    assert abs(reference_logprobs(model, ids) - reference_logprobs(trained, ids)).max() < 2e-5
    card = (tmp_path / "model" / "README.md").read_text()
    assert "with adapters (LoRA) of rank 2, alpha 4, on attention, experts, merged" in card
    assert "[lora]\nrank = 2" in card


def test_the_adapters_alone_are_what_peft_loads(run: Path, tmp_path: Path, trained: Any) -> None:
    from peft import PeftModel

    assert export_command([str(run), "--adapter"]) == 0
    directory = run.with_name("run-batch-10-adapter")
    assert {path.name for path in directory.iterdir()} == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    config = json.loads((directory / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (2, 4.0, "LORA")
    model = PeftModel.from_pretrained(tiny_qwen3_moe(), directory).eval()
    ids = list(range(20, 60))
    assert abs(reference_logprobs(model, ids) - reference_logprobs(trained, ids)).max() < 2e-5
    assert abs(reference_logprobs(model, ids) - reference_logprobs(tiny_qwen3_moe(), ids)).max() > 0.01
    assert (directory / "README.md").read_text().startswith("---\nlibrary_name: peft\n")


def test_each_of_several_adapters_has_a_folder_that_peft_loads_and_they_are_not_merged(
    tmp_path: Path, start: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import PeftModel

    plan = LoraPlan(rank=2, alpha=4.0, target_modules=("attention",), num_adapters=2)
    model, directory = tiny_qwen3_moe(), tmp_path / "run"
    inject_lora(model, plan, seed=3)
    own = dict[str, torch.Tensor]()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_lora(name):
                own[lora_name(name)] = parameter.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    directory.mkdir()
    lora = LoraSection(
        rank=2, alpha=4.0, target_modules=["attention"], publish="adapter", adapters=["sums", "words"], adapter_field="kind"
    )
    write_run_settings(Settings(run=Run(directory=directory, num_batches=60), model=Model(path=start), lora=lora))
    write_model_checkpoint(directory, model, 11, 10, plan=plan, names=lora.adapters)
    assert export_command([str(directory), "--adapter", "--to", str(tmp_path / "both")]) == 0
    for place, name in enumerate(lora.adapters):
        folder = tmp_path / "both" / name
        config = json.loads((folder / "adapter_config.json").read_text())
        assert (config["r"], config["lora_alpha"]) == (2, 4.0)
        found = load_file(folder / "adapter_model.safetensors")
        assert len(found) == len(own)
        for key, value in own.items():
            assert torch.equal(found[f"base_model.model.{key}"], part_of(value, key, place, 2)), key
        PeftModel.from_pretrained(tiny_qwen3_moe(), folder)
    assert export_command([str(directory), "--to", str(tmp_path / "merged")]) == 2
    assert "has the adapters sums, words, and merged weights would have one of them: export" in capsys.readouterr().err


def test_another_starting_model_is_refused_and_leaves_nothing(
    run: Path, tmp_path: Path, start: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_qwen3_moe(seed=9).save_pretrained(tmp_path / "other")
    assert export_command([str(run), "--to", str(tmp_path / "model"), "--model", str(tmp_path / "other")]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path / 'other'} is not the model that" in error
    assert "which was at models/start, with digest" in error
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("lost", ["model.safetensors", "lm_head.weight"])
def test_a_starting_model_without_its_weights_is_refused(
    run: Path, tmp_path: Path, start: Path, lost: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import save_file

    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_bytes((start / "config.json").read_bytes())
    if lost != "model.safetensors":
        tensors = load_file(start / "model.safetensors")
        del tensors[lost]
        save_file(tensors, other / "model.safetensors")
    assert export_command([str(run), "--to", str(tmp_path / "model"), "--model", str(other)]) == 2
    assert "is not there: name the model that the run started from with --model DIR" in capsys.readouterr().err


def test_a_flipped_bit_of_an_adapter_is_found(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path, *_) = sorted((run / "checkpoints").rglob("*lora_B*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # The tensors are in order of their names: "weight" is the last.
    path.write_bytes(data)
    for extra in ([], ["--adapter"]):
        assert export_command([str(run), "--to", str(tmp_path / "model"), *extra]) == 1
        assert f"{path} has digest" in capsys.readouterr().err


def test_a_checkpoint_of_all_weights_has_no_adapters_to_export(
    tmp_path: Path, start: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "whole"
    directory.mkdir()
    write_run_settings(Settings(run=Run(directory=directory), model=Model(path=start)))
    write_model_checkpoint(directory, tiny_qwen3_moe(seed=7), 11, 10)
    assert export_command([str(directory), "--adapter"]) == 2
    assert "holds all weights of the model, not adapters: leave it out" in capsys.readouterr().err

"""Quantised checkpoints in bfloat16: held against the forms' own definitions."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file
from torch import Tensor

from gspo_services.prepare import dequantise

NAME: Final = "model.layers.1.mlp.experts.0.down_proj.weight"


def save(directory: Path, tensors: dict[str, Tensor], **quantised: Any) -> Path:
    """Two files: a tensor's scales lie in the other one."""
    directory.mkdir()
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, own in halves.items():
        save_file({name: tensors[name] for name in own}, directory / file, metadata={"format": "pt"})
    weight_map = {name: file for file, own in halves.items() for name in own}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {"model_type": "x", "torch_dtype": "float16", "quantization_config": quantised}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    return directory


def made(source: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    new = source.with_name("new")
    monkeypatch.setattr(sys, "argv", ["gspo model dequantise", str(source), str(new)])
    assert dequantise.main() == 0
    assert json.loads((new / "config.json").read_text()) == {"model_type": "x", "dtype": "bfloat16"}
    assert sorted(path.name for path in new.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    return load_file(new / "model.safetensors")


def test_block_fp8_is_its_numbers_times_those_of_their_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last blocks are narrower, as in DeepSeek-V3's keys; what is not quantised keeps its value, and a bias its type."""
    quantised = torch.randn(5, 7).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 2) + 0.5
    tensors = {NAME: quantised, f"{NAME}_scale_inv": scale, "model.norm.weight": torch.ones(7)}
    tensors["model.layers.1.mlp.gate.e_score_correction_bias"] = torch.rand(8)
    source = save(tmp_path / "old", tensors, quant_method="fp8", weight_block_size=[2, 4])
    new = made(source, monkeypatch)
    assert set(new) == {NAME, "model.norm.weight", "model.layers.1.mlp.gate.e_score_correction_bias"}
    for row in range(5):
        for column in range(7):
            expected = quantised[row, column].float() * scale[row // 2, column // 4]
            assert new[NAME][row, column] == expected.to(torch.bfloat16)
    assert new["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32


def test_mxfp4_gives_the_experts_of_gpt_oss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = torch.randint(0, 256, (2, 6, 2, 16), dtype=torch.uint8)
    scales = torch.randint(120, 130, (2, 6, 2), dtype=torch.uint8)
    own = "model.layers.0.mlp.experts.gate_up_proj"
    source = save(tmp_path / "old", {f"{own}_blocks": blocks, f"{own}_scales": scales}, quant_method="mxfp4")
    value = made(source, monkeypatch)[own]
    assert value.shape == (2, 64, 6)
    digits = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    low = int(blocks[1, 3, 1, 5]) & 15
    expected = (-1.0 if low & 8 else 1.0) * digits[low & 7] * 2.0 ** (int(scales[1, 3, 1]) - 127)
    assert value[1, 32 + 2 * 5, 3] == expected


def test_int4_is_as_compressed_tensors_packs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.randint(-8, 8, (4, 64), dtype=torch.int8)
    scale = (torch.rand(4, 2) + 0.5).to(torch.bfloat16)
    tensors = {
        f"{NAME}_packed": pack_to_int32(numbers, 4), f"{NAME}_scale": scale, f"{NAME}_shape": torch.tensor([4, 64]),
    }  # fmt: skip
    weights = {"num_bits": 4, "symmetric": True, "type": "int", "group_size": 32}
    source = save(
        tmp_path / "old", tensors, quant_method="compressed-tensors", format="pack-quantized",
        config_groups={"group_0": {"weights": weights}},
    )  # fmt: skip
    expected = (numbers.float() * scale.float().repeat_interleave(32, 1)).to(torch.bfloat16)
    assert torch.equal(made(source, monkeypatch)[NAME], expected)


@pytest.mark.parametrize(
    ("tensors", "quantised", "words"),
    [
        ({NAME: torch.ones(2, 2).to(torch.float8_e4m3fn)}, {"quant_method": "fp8"}, "is F8_E4M3, in no form of fp8"),
        ({NAME: torch.ones(2, 2)}, {"quant_method": "awq"}, "quant_method is awq"),
        (
            {NAME: torch.ones(4, 4).to(torch.float8_e4m3fn), f"{NAME}_scale_inv": torch.ones(4, 4)},
            {"quant_method": "fp8", "weight_block_size": [2, 2]},
            "and weight_block_size [2, 2]",
        ),
        (
            {f"{NAME}_packed": torch.ones(2, 1, dtype=torch.int32), f"{NAME}_scale": torch.ones(2, 1),
             f"{NAME}_shape": torch.tensor([2, 8])},
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
            "symmetric INT4 in pack-quantized is known",
        ),
    ],
    ids=["no scale", "method", "blocks", "format"],
)  # fmt: skip
def test_what_is_not_known_is_named_and_nothing_is_left(
    tensors: dict[str, Tensor], quantised: dict[str, Any], words: str, tmp_path: Path
) -> None:
    source = save(tmp_path / "old", tensors, **quantised)
    with pytest.raises(ValueError, match=r".") as caught:
        dequantise.dequantise(source, tmp_path / "new")
    assert words in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_a_model_that_is_not_quantised_and_a_directory_that_is_there_are_refused(tmp_path: Path) -> None:
    source = save(tmp_path / "old", {NAME: torch.ones(2, 2)})
    with pytest.raises(ValueError, match="quant_method is None"):
        dequantise.dequantise(source, tmp_path / "new")
    with pytest.raises(ValueError, match="is there already"):
        dequantise.dequantise(source, source)

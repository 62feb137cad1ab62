"""Exports of other families: dense models with tied embeddings, and a mixture of experts with other names on disk."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from gspo_services.runs.export.weights import CheckpointWeights
from gspo_services.runs.export.writer import write_export
from tests.support.runs.model_checkpoints import write_model_checkpoint

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip


@pytest.mark.parametrize("family", ["tied", "untied", "mixtral"])
def test_an_export_has_the_names_and_bits_that_save_pretrained_writes(family: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    if family == "mixtral":
        model: Any = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=family == "tied"))
    model.save_pretrained(tmp_path / "start")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.5
    checkpoint = write_model_checkpoint(tmp_path / "run", model, 1, 1)
    with ExitStack() as hold:
        weights = CheckpointWeights(checkpoint, tmp_path / "start", hold)
        write_export(weights, tmp_path / "model", dtype="float32", model_dir=tmp_path / "start", card="")
    model.save_pretrained(tmp_path / "expected")
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "expected"))
    assert set(found) == set(expected)
    assert ("lm_head.weight" in found) == (family != "tied")
    assert all(torch.equal(found[name], expected[name]) for name in expected)

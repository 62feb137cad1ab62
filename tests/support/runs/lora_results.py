"""What holds of every run with adapters, on any number of ranks."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gspo_services.runs.export.adapted import open_checkpoint
from gspo_services.runs.export.writer import write_export
from tests.support.learner.parallel_jobs import RESUMED_STEPS, Results, checkpoint
from tests.support.learner.tiny_model import reference_logprobs, tiny_qwen3_moe

BOTH: dict[str, Any] = {"rank": 4, "alpha": 8.0, "target_modules": ["attention", "experts"]}
ATTENTION: dict[str, Any] = BOTH | {"target_modules": ["attention"]}
STEPS = 2 + RESUMED_STEPS
TOLERANCE = 2e-5


def require_same_steps(results: Results, name: str, one: Results) -> None:
    """All ranks made the steps that one rank made in its job "single"."""
    assert results[0][name]["losses"] == results[1][name]["losses"]
    assert results[0][name]["losses"] == pytest.approx(one[0]["single"]["losses"], abs=1e-5)
    assert results[0][name]["norms"] == pytest.approx(one[0]["single"]["norms"], rel=1e-4)


def require_served_names(work: Path, name: str, *, all_weights: bool) -> None:
    """The served tensors are the model's own, and those with adapters have changed: of the attention, or of all weights."""
    before, served = load_file(work / "model" / "model.safetensors"), load_file(work / f"{name}.safetensors")
    assert set(served) == set(before)
    changed = {key for key in served if not torch.equal(served[key], before[key])}
    projections = ["q_proj", "k_proj", "v_proj", "o_proj"] + (["gate_proj", "up_proj", "down_proj"] if all_weights else [])
    assert changed == {key for key in before if any(f".{projection}." in key for projection in projections)}


def require_log_probs(work: Path, name: str, results: Results) -> None:
    """The exported model has the log-probs of the learner with its adapters, and not those of the starting model."""
    model, untouched = load_model(work / f"{name}-export"), tiny_qwen3_moe()
    moved = 0.0
    for token_ids, logprobs in results[0][name]["scored"]:
        assert np.abs(reference_logprobs(model, token_ids) - np.array(logprobs)).max() < TOLERANCE
        moved = max(moved, float(np.abs(reference_logprobs(untouched, token_ids) - np.array(logprobs)).max()))
    assert moved > 100 * TOLERANCE, "the adapters hardly change anything"


def require_same_export(work: Path, loaded: Results, name: str, dtype: str) -> None:
    """``gspo export`` of a checkpoint writes, bit for bit, what a learner serves that has loaded it."""
    with ExitStack() as hold:
        weights = open_checkpoint(checkpoint(work, name), work / "model", hold)
        assert weights.num_parameters == sum(parameter.numel() for parameter in tiny_qwen3_moe().parameters())
        write_export(weights, work / f"{name}-alone", dtype=dtype, model_dir=work / "model", card="# card\n")
    served = work / f"{name}-loaded-export" / "model.safetensors"
    assert "error" not in loaded[0][f"{name}-loaded"]
    assert (work / f"{name}-alone" / "model.safetensors").read_bytes() == served.read_bytes()


def load_model(directory: Path) -> Any:
    """In float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

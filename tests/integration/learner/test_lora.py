"""Adapters on one rank and on two, beside partitioned and shared experts: training, checkpoints, exports.

Tests of two ranks run with the other stages (tests/ranks/test_lora_stages.py), tests of one rank by default.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gspo_services.runs.export.adapted import AdaptedCheckpointWeights, open_checkpoint
from gspo_services.runs.export.writer import write_adapter, write_export
from gspo_services.shared.runtime.errors import ConfigurationError
from tests.support.learner.parallel_jobs import (
    RESUMED_STEPS,
    Results,
    checkpoint,
    job,
    run_jobs,
    state,
)
from tests.support.learner.tiny_model import reference_logprobs, tiny_qwen3_moe
from tests.support.learner.training_groups import write_model_and_groups
from tests.support.runs.lora_results import (
    ATTENTION,
    BOTH,
    STEPS,
    TOLERANCE,
    load_model,
    require_log_probs,
    require_same_export,
    require_same_steps,
    require_served_names,
)

SAVED: dict[str, dict[str, Any]] = {
    "stage-3": {"lora": BOTH},
    "shared": {"lora": ATTENTION},
}
"""Runs on two ranks whose checkpoints are exported, and how one rank loads them."""
pytestmark = pytest.mark.timeout(1000)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("lora")
    write_model_and_groups(directory)
    tiny_qwen3_moe(seed=99).save_pretrained(directory / "other")
    return directory


@pytest.fixture(scope="module")
def two(work: Path) -> Results:
    """Two ranks."""
    full = {"steps": STEPS, "save_after": 2, "export": True}
    return run_jobs(
        work,
        2,
        [
            job("stage-3", zero_stage=3, lora=BOTH, in_background=True, **full),
            job("shared", zero_stage=3, expert_parallel=2, lora=ATTENTION, **full),
        ],
    )


@pytest.fixture(scope="module")
def one(work: Path) -> Results:
    """One rank."""
    return run_jobs(
        work,
        1,
        [
            job("single", zero_stage=0, lora=BOTH, steps=STEPS, save_after=2, export=True),
            job("again", zero_stage=0, lora=BOTH, resume="single", steps=RESUMED_STEPS),
            job("unshared", zero_stage=0, lora=ATTENTION, steps=STEPS, export=True),
            job("whole", zero_stage=1, save_after=1),
            job("other-base", model="other", zero_stage=1, lora=BOTH, resume="single"),
            job("other-rank", zero_stage=1, lora=BOTH | {"rank": 8}, resume="single"),
            job("none", zero_stage=1, resume="single"),
            job("from-whole", zero_stage=1, lora=BOTH, resume="whole"),
        ],
    )


@pytest.fixture(scope="module")
def after(work: Path, two: Results) -> Results:
    """One rank, which goes on where the two were."""
    return run_jobs(
        work,
        1,
        [
            job("fewer", zero_stage=2, offload="optimizer", lora=BOTH, resume="stage-3", steps=RESUMED_STEPS),
            *(job(f"{name}-loaded", zero_stage=1, resume=name, steps=0, export=True, **SAVED[name]) for name in SAVED),
        ],
    )


@pytest.mark.ranks
def test_two_ranks_train_the_adapters_as_one_does(one: Results, two: Results) -> None:
    require_same_steps(two, "stage-3", one)


@pytest.mark.ranks
def test_adapters_of_attention_train_beside_shared_experts(work: Path, one: Results, two: Results) -> None:
    assert two[0]["shared"]["losses"] == pytest.approx(one[0]["unshared"]["losses"], abs=1e-5)
    assert two[0]["shared"]["norms"] == pytest.approx(one[0]["unshared"]["norms"], rel=1e-4)
    found, expected = load_file(work / "shared.safetensors"), load_file(work / "unshared.safetensors")
    assert set(found) == set(expected)
    assert max(float((found[name] - expected[name]).abs().max()) for name in expected) < 1e-4


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["stage-3", "shared"])
def test_what_is_served_are_the_models_own_names_with_the_adapters_in_them(work: Path, two: Results, name: str) -> None:
    require_served_names(work, name, all_weights=name != "shared")


def test_merged_weights_have_the_log_probs_of_the_adapters(work: Path, one: Results) -> None:
    require_log_probs(work, "single", one)


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["stage-3", "shared"])
def test_merged_weights_of_two_ranks_have_the_log_probs_of_the_adapters(work: Path, two: Results, name: str) -> None:
    require_log_probs(work, name, two)


def test_a_checkpoint_holds_the_adapters_alone(work: Path, one: Results) -> None:
    saved = state(work, "single")
    assert {key.rpartition("/")[2] for key in saved} == {"weight", "exp_avg", "exp_avg_sq"}
    assert all(".lora_A." in key or ".lora_B." in key for key in saved)
    assert len(saved) == 3 * 2 * 2 * (4 + 2), "A and B of four projections and two stacks, in two layers"
    # A tiny model's hidden size is not far from the rank; of a real one this would be a hundredth.
    num_bytes = sum(path.stat().st_size for path in checkpoint(work, "single").rglob("*.safetensors"))
    whole = sum(path.stat().st_size for path in checkpoint(work, "whole").rglob("*.safetensors"))
    assert num_bytes < 0.4 * whole
    assert all(saved[key].abs().max() > 0 for key in saved if "lora_B" in key and key.endswith("/weight"))


def test_a_resumed_learner_continues_bit_for_bit(one: Results) -> None:
    assert one[0]["again"]["losses"] == one[0]["single"]["losses"][-RESUMED_STEPS:]
    assert one[0]["again"]["norms"] == one[0]["single"]["norms"][-RESUMED_STEPS:]
    assert one[0]["again"]["digest"] == one[0]["single"]["digest"]


@pytest.mark.ranks
def test_adapters_resume_on_other_ranks_in_another_stage_and_offload(two: Results, after: Results) -> None:
    fewer, uninterrupted = after[0]["fewer"], two[0]["stage-3"]
    assert fewer["losses"] == pytest.approx(uninterrupted["losses"][-RESUMED_STEPS:], abs=1e-5)
    assert fewer["norms"] == pytest.approx(uninterrupted["norms"][-RESUMED_STEPS:], rel=1e-4)
    assert fewer["rates"] == uninterrupted["rates"][-RESUMED_STEPS:]
    assert fewer["offloaded"][0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("other-base", "holds adapters of the model that was at .*model, with digest .*; the model at .*other has .*; name"),
        (
            "other-rank",
            r"rank = 4, alpha = 8.0, target_modules = \['attention', 'experts'\], and \[lora\] says rank = 8, .*use the",
        ),
        ("none", r"holds adapters .*, and lora.rank is 0; continue the run with the \[lora\] that it began with"),
        ("from-whole", "holds all weights, and lora.rank is 4; continue the run with lora.rank = 0"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_values_and_the_way_out(one: Results, name: str, message: str) -> None:
    assert re.search(message, one[0][name]["error"]), one[0][name]


@pytest.mark.ranks
@pytest.mark.parametrize("name", SAVED)
def test_an_export_of_a_checkpoint_is_bit_for_bit_what_the_learner_serves(work: Path, after: Results, name: str) -> None:
    require_same_export(work, after, name, "float32")


def test_an_export_with_another_starting_model_is_refused(work: Path, one: Results) -> None:
    with ExitStack() as hold:
        weights = open_checkpoint(checkpoint(work, "single"), work / "other", hold)
        with pytest.raises(ConfigurationError, match=r"other is not the model that .* was trained on, .*--model DIR"):
            list(weights.serving_weights(torch.float32))


def test_peft_loads_the_adapters_and_has_the_learners_log_probs(work: Path, one: Results) -> None:
    from peft import PeftModel

    with ExitStack() as hold:
        weights = open_checkpoint(checkpoint(work, "single"), work / "model", hold)
        assert isinstance(weights, AdaptedCheckpointWeights)
        write_export(weights, work / "single-alone", dtype="float32", model_dir=work / "model", card="# card\n")
        write_adapter(weights, work / "adapter", card="# card\n")
    adapted = PeftModel.from_pretrained(tiny_qwen3_moe(), work / "adapter").eval()
    token_ids = one[0]["single"]["scored"][0][0]
    expected = reference_logprobs(load_model(work / "single-alone"), token_ids)
    assert np.abs(reference_logprobs(adapted, token_ids) - expected).max() < TOLERANCE
    assert np.abs(reference_logprobs(tiny_qwen3_moe(), token_ids) - expected).max() > 100 * TOLERANCE

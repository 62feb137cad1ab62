"""Four ranks start: what memory each takes, whether the weights are those of from_pretrained, and files that are broken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo.model.serving import serving_weights
from gspo_services.runs.export.weights import state_digest_of
from tests.support.learner.ranks import Ranks
from tests.support.starts.small_models import save_small_model

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1000)]

RANKS = 4
MIB = 2**20
LARGE = {"hidden_size": 256, "moe_intermediate_size": 512, "num_hidden_layers": 4, "num_experts": 16, "vocab_size": 4096}
LAYER_BYTES = 16 * 3 * 256 * 512 * 4
SLACK_BYTES = 64 * MIB
"""The project allows 300 MB, which a small model that is read whole would not exceed."""
OFFLOAD = "optimizer_and_parameters"
LAYOUTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"zero_stage": 3, "expert_parallel": 2, "dtype": "bfloat16", "offload": OFFLOAD},
    "mixtral": {"zero_stage": 3},
    "qwen3_tied": {"zero_stage": 3, "dtype": "bfloat16"},
    "llama": {"zero_stage": 2},
}
"""By the kind of small model."""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("start")
    for kind in LAYOUTS:
        save_small_model(directory / kind, kind)
    save_small_model(directory / "large", "qwen3_moe", **LARGE)
    for rank in range(RANKS):
        shutil.copytree(directory / "mixtral", directory / f"cut-on-two-{rank}")
    last = max((directory / "cut-on-two-2").glob("*.safetensors"))
    last.write_bytes(last.read_bytes()[:-1])
    shutil.copytree(directory / "llama", directory / "incomplete")
    min((directory / "incomplete").glob("*.safetensors")).unlink()
    return directory


@pytest.fixture(scope="module")
def starts(work: Path) -> list[dict[str, dict[str, Any]]]:
    """By rank, what each start was like."""
    plan: dict[str, dict[str, Any]] = {kind: {"model": kind, "settings": layout} for kind, layout in LAYOUTS.items()}
    plan |= {
        "cut": {"model": "cut-on-two-{rank}", "settings": {"zero_stage": 3}},
        "incomplete": {"model": "incomplete", "settings": {"zero_stage": 1}},
        "large": {"model": "large", "settings": {"zero_stage": 3}},
        "by_transformers": {
            "model": "large",
            "settings": {"zero_stage": 3},
            "by_transformers": True,
            "with_optimizer": False,
        },
    }
    return run_starts(work, plan)


def run_starts(work: Path, plan: Mapping[str, dict[str, Any]]) -> list[dict[str, dict[str, Any]]]:
    path = work / "plan.json"
    content: Sequence[dict[str, Any]] = [each | {"model": str(work / each["model"])} for each in plan.values()]
    path.write_text(json.dumps(content), encoding="utf-8")
    with Ranks("tests.support.starts.start_worker", [str(path)], RANKS, path) as ranks:
        ranks.finish(900)
    found = [json.loads(path.with_suffix(f".{rank}.out").read_text(encoding="utf-8")) for rank in range(RANKS)]
    return [dict(zip(plan, each, strict=True)) for each in found]


def test_no_rank_takes_more_than_its_share_and_a_layer_to_load_a_mixture_of_experts(
    work: Path, starts: list[dict[str, dict[str, Any]]]
) -> None:
    model_bytes = sum(path.stat().st_size for path in (work / "large").glob("*.safetensors"))
    assert model_bytes > 100 * MIB
    for rank in starts:
        assert rank["large"]["loading"] < model_bytes / RANKS + LAYER_BYTES + SLACK_BYTES
        # The way that is left for classes that cannot be read range by range.
        assert rank["by_transformers"]["loading"] > model_bytes


def test_a_rank_that_has_started_takes_what_zero_3_takes_of_its_share(
    work: Path, starts: list[dict[str, dict[str, Any]]]
) -> None:
    model_bytes = sum(path.stat().st_size for path in (work / "large").glob("*.safetensors"))
    for rank in starts:
        # Weights, gradients, masters and two moments; the weights once more while they are put into one piece.
        assert rank["large"]["starting"] < 6 * model_bytes / RANKS + LAYER_BYTES + 2 * SLACK_BYTES


@pytest.mark.parametrize("kind", [*LAYOUTS, "large"])
def test_the_weights_are_bit_for_bit_those_of_from_pretrained(
    work: Path, starts: list[dict[str, dict[str, Any]]], kind: str
) -> None:
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, LAYOUTS.get(kind, {}).get("dtype", "float32"))
    model = AutoModelForCausalLM.from_pretrained(work / kind, dtype=dtype)
    expected = state_digest_of(serving_weights(model, gathered=nullcontext))
    assert [rank[kind]["digest"] for rank in starts] == [expected] * RANKS


def test_a_file_that_is_cut_off_on_one_rank_ends_all_with_its_error(starts: list[dict[str, dict[str, Any]]]) -> None:
    (error,) = {rank["cut"]["error"] for rank in starts}
    assert "rank 2:" in error
    assert "cut-on-two-2" in error
    assert "it is truncated or damaged; copy or download the model again" in error


def test_a_file_that_is_not_there_is_named_on_all_ranks(starts: list[dict[str, dict[str, Any]]]) -> None:
    (error,) = {rank["incomplete"]["error"] for rank in starts}
    assert "which is not there; copy or download the model again" in error

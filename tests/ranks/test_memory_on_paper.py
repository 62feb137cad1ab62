"""The learner's real step with fake tensors, as one rank of many: its peak beside those of GPUs, of this machine, and of the
estimate that `gspo check` shows.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import pytest

from gspo_services.shared.estimates import CUDA_BYTES, learner_memory, shape_of, traffic_of
from gspo_services.shared.settings import Settings
from tests.support.learner.ranks import Ranks
from tests.support.paper.peak_worker import Case, Peak

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1000)]

GPU: Final = json.loads((Path(__file__).parents[2] / "docs/evidence/gpu-h200.json").read_text(encoding="utf-8"))
LAYERS: Final[dict[str, dict[str, Any]]] = {
    "layers-4": {"layers": 4},
    "layers-2-larger-chunks": {"layers": 2, "learner": {"logprob_chunk_tokens": 8192}},
    "layers-2-no-checkpointing": {"layers": 2, "learner": {"activation_checkpointing": False}},
}
"""Steps of tests.gpu.half_hour.layers."""
LAYOUTS: Final = (
    Case(model="Qwen3-8B", layers=4, num_ranks=8, learner={"zero_stage": 2}),
    Case(model="Qwen3-30B-A3B", layers=4, num_ranks=8, learner={"zero_stage": 1}),
    Case(model="Qwen3-30B-A3B", layers=4, num_ranks=8, learner={"zero_stage": 2, "expert_parallel": 8}),
    Case(model="Qwen3-30B-A3B", layers=4, num_ranks=8, learner={"sequence_parallel": 8}),
    Case(model="Qwen3-235B-A22B", layers=4, num_ranks=64),
    Case(model="GLM-4.5-Air", layers=4, num_ranks=24),
    Case(model="gpt-oss-120b", layers=2, num_ranks=8),
    Case(model="gpt-oss-120b", layers=2, num_ranks=8, learner={"expert_parallel": 8}),
    Case(model="DeepSeek-V3", layers=6, num_ranks=64),
    Case(model="MiniMax-M2", layers=4, num_ranks=32),
    Case(model="Qwen3-Next-80B-A3B", layers=4, num_ranks=8),
)
FLOAT32: Final[dict[str, Any]] = {"dtype": "float32", "zero_stage": 1, "activation_checkpointing": False}
# On paper, experts are multiplied in bfloat16 alone.
BFLOAT16: Final[dict[str, Any]] = {"zero_stage": 2}
REAL: Final = tuple(
    Case(model=model, layers=layers, tokens=64, device="cpu", learner=learner, config_changes={"vocab_size": 32_000} | more)
    for model, layers, learner, more in (
        ("Qwen3-0.6B", 3, FLOAT32, {}),
        ("Qwen3-8B", 1, FLOAT32, {"hidden_size": 1024, "intermediate_size": 8192}),
        ("Qwen3-30B-A3B", 2, BFLOAT16, {"hidden_size": 1024, "num_experts": 16, "num_experts_per_tok": 2}),
    )
)


def measured(case: Case, folder: Path, **changes: Any) -> Peak:
    path = folder / f"case{len(list(folder.iterdir()))}.json"
    path.write_text(json.dumps(asdict(case) | changes), encoding="utf-8")
    with Ranks("tests.support.paper.peak_worker", [str(path)], 1, path) as ranks:
        ranks.finish(900)
    return Peak(**json.loads(path.with_suffix(".out").read_text(encoding="utf-8")))


@pytest.mark.parametrize("step", LAYERS)
def test_a_peak_on_paper_is_what_a_gpu_measured(tmp_path: Path, step: str) -> None:
    (found,) = (each["found"]["peak_gib"] for each in GPU["steps"] if each["step"] == step)
    given = {"learner": {}} | LAYERS[step]
    case = Case(model="Qwen3-30B-A3B", micro_batches=1, **given | {"learner": {"zero_stage": 2} | given["learner"]})
    assert measured(case, tmp_path).peak / 2**30 == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize("case", LAYOUTS, ids=lambda case: f"{case.model}-{case.learner}")
def test_the_estimate_is_within_a_tenth_of_the_peak_on_paper(tmp_path: Path, case: Case) -> None:
    settings = Settings.model_validate({"learner": case.section()})
    shape, peak = shape_of(case.config()), measured(case, tmp_path)
    total = learner_memory(shape, settings, cuda=True).total
    expected = (total.low - CUDA_BYTES.low + total.high - CUDA_BYTES.high) / 2
    assert expected == pytest.approx(peak.peak, rel=0.1)
    learner = settings.learner
    together = max(learner.expert_parallel, learner.sequence_parallel)
    if together > 1:
        # Each rank keeps its own part of what it exchanges.
        exchanged = case.micro_batches * traffic_of(shape, settings, case.tokens).exchanged
        assert exchanged == pytest.approx(peak.sent["alltoall_base_"] * (1 - 1 / together), rel=0.01)


@pytest.mark.parametrize("case", REAL, ids=lambda case: case.model)
def test_a_process_takes_what_was_worked_out(tmp_path: Path, case: Case) -> None:
    paper, real = measured(case, tmp_path), measured(case, tmp_path, is_real=True)
    assert real.peak > 2**29, "too small a model to tell"
    assert real.peak == pytest.approx(paper.peak, rel=0.1)

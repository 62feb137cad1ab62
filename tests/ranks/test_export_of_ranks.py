"""Checkpoints that two ranks wrote become, without ranks, bit for bit the model that the ranks export together."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gspo_services.runs.export.weights import CheckpointWeights
from gspo_services.runs.export.writer import CARD, write_export
from tests.support.learner.parallel_jobs import checkpoint, job, run_jobs
from tests.support.learner.training_groups import write_model_and_groups

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1000)]
LAYOUTS = {
    "replicated": {"zero_stage": 0},
    "experts": {"zero_stage": 3, "expert_parallel": 2},
    "half": {"zero_stage": 2, "dtype": "bfloat16"},
    "half-experts": {"zero_stage": 3, "expert_parallel": 2, "dtype": "bfloat16"},
}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For each layout a checkpoint after one step, and the ranks' own export of the same weights."""
    directory = tmp_path_factory.mktemp("exports")
    write_model_and_groups(directory)
    run_jobs(directory, 2, [job(name, save_after=1, export=True, **layout) for name, layout in LAYOUTS.items()])
    return directory


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_checkpoint_of_two_ranks_is_exported_as_the_ranks_would(name: str, work: Path) -> None:
    alone, together = work / f"{name}-alone", work / f"{name}-export"
    dtype = "bfloat16" if name.startswith("half") else "float32"
    with ExitStack() as hold:
        weights = CheckpointWeights(checkpoint(work, name), work / "model", hold)
        write_export(weights, alone, dtype=dtype, model_dir=work / "model", card="# card\n")
    before = load_file(work / "model" / "model.safetensors")
    after = load_file(alone / "model.safetensors")
    assert any(not torch.equal(after[key], before[key].to(after[key].dtype)) for key in before), "nothing was trained"
    files = {path.name for path in together.iterdir()}
    assert {path.name for path in alone.iterdir()} - {CARD} == files - {CARD}
    for file in files - {CARD}:
        assert (alone / file).read_bytes() == (together / file).read_bytes(), file

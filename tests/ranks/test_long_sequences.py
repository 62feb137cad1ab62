"""One long sequence on four ranks that share its tokens: gradients of one rank, and a quarter of what it keeps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gspo.model.packing import TrainGroup
from tests.support.learner.parallel_jobs import Results, gradient_job, require_gradients, run_jobs
from tests.support.loss.sequences import random_sequence, save_groups
from tests.support.policy.architectures import tiny_model

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1800)]

LENGTHS = {"windows": 131_072, "full": 8_192}
"""Tokens of the long sequence, by what the layers of the model see: windows of 7 tokens, or all."""
PARAMETERS = 2 * (7 + 2 + 2) + 3
"""2 layers of seven projections, two norms of heads and two others; embeddings, head, last norm."""


@pytest.fixture(scope="module")
def long_work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of each kind, and a group of a long sequence and a short one."""
    work = tmp_path_factory.mktemp("long")
    for name, layer in (("windows", "sliding_attention"), ("full", "full_attention")):
        length = LENGTHS[name]
        model = tiny_model("Qwen3, window", num_hidden_layers=2, layer_types=[layer] * 2, max_position_embeddings=length)
        model.save_pretrained(work / name)
        members = tuple(random_sequence(size, seed, vocab_size=64) for seed, size in enumerate((length, 33)))
        group = TrainGroup(group_id=name, sequences=members, rewards=np.array([1.0, 0.0]))
        save_groups(work / f"{name}.npz", [group])
    return work


@pytest.fixture(scope="module")
def alone(long_work: Path) -> Results:
    return run_jobs(
        long_work,
        1,
        [
            gradient_job(f"{name}-alone", model=name, groups=f"{name}.npz", count_saved=True, zero_stage=0)
            for name in LENGTHS
        ],
    )


@pytest.fixture(scope="module")
def four(long_work: Path) -> Results:
    return run_jobs(
        long_work,
        4,
        [
            gradient_job(
                f"{name}-of-4", model=name, groups=f"{name}.npz", count_saved=True, sequence_parallel=4, zero_stage=3
            )
            for name in LENGTHS
        ],
    )


@pytest.mark.parametrize("name", LENGTHS)
def test_one_long_sequence_on_four_ranks_has_the_gradients_of_one(
    long_work: Path, alone: Results, four: Results, name: str
) -> None:
    assert four[0][f"{name}-of-4"].get("error") is None, four[0]
    assert four[0][f"{name}-of-4"]["losses"] == pytest.approx(alone[0][f"{name}-alone"]["losses"], rel=1e-5)
    require_gradients(long_work, f"{name}-of-4", f"{name}-alone", num_parameters=PARAMETERS)


@pytest.mark.parametrize("name", LENGTHS)
def test_each_of_four_ranks_keeps_a_quarter_of_the_activations(alone: Results, four: Results, name: str) -> None:
    whole = alone[0][f"{name}-alone"]["saved_bytes"]
    for rank in range(4):
        assert 0.2 * whole < four[rank][f"{name}-of-4"]["saved_bytes"] < 0.35 * whole, rank

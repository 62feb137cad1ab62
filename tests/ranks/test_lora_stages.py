"""Adapters on two ranks in every ZeRO stage and in bfloat16; with offload: the steps of one rank, checkpoints, exports."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.learner.parallel_jobs import Results, job, run_jobs
from tests.support.learner.training_groups import write_model_and_groups
from tests.support.runs.lora_results import (
    BOTH,
    STEPS,
    require_log_probs,
    require_same_export,
    require_same_steps,
    require_served_names,
)

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1000)]

STAGES = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("lora")
    write_model_and_groups(directory)
    return directory


@pytest.fixture(scope="module")
def one(work: Path) -> Results:
    return run_jobs(work, 1, [job("single", zero_stage=0, lora=BOTH, steps=STEPS)])


@pytest.fixture(scope="module")
def two(work: Path) -> Results:
    full = {"lora": BOTH, "steps": STEPS, "save_after": 2, "export": True}
    jobs = [job(f"stage-{stage}", zero_stage=stage, in_background=stage >= 2, **full) for stage in STAGES]
    return run_jobs(work, 2, [*jobs, job("half", zero_stage=3, dtype="bfloat16", **full)])


@pytest.fixture(scope="module")
def after(work: Path, two: Results) -> Results:
    """One rank, which goes on where the two were."""
    return run_jobs(
        work,
        1,
        [
            job("hosted", zero_stage=3, offload="optimizer_and_parameters", lora=BOTH, resume="stage-1", steps=1),
            job("half-loaded", zero_stage=1, resume="half", steps=0, export=True, lora=BOTH, dtype="bfloat16"),
        ],
    )


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_train_the_adapters_as_one_does(work: Path, one: Results, two: Results, stage: int) -> None:
    require_same_steps(two, f"stage-{stage}", one)
    require_served_names(work, f"stage-{stage}", all_weights=True)
    require_log_probs(work, f"stage-{stage}", two)


def test_adapters_resume_in_the_hosts_memory(two: Results, after: Results) -> None:
    assert after[0]["hosted"]["losses"] == pytest.approx(two[0]["stage-1"]["losses"][2:3], abs=1e-5)


def test_an_export_in_bfloat16_is_bit_for_bit_what_the_learner_serves(work: Path, after: Results) -> None:
    require_same_export(work, after, "half", "bfloat16")

"""Four ranks: gradients in every stage and expert-parallel size, clipping, and checkpoints resumed on 1, 2 and 4."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.conftest import REPLAY
from tests.support.learner.parallel_jobs import (
    RESUMED_STEPS,
    Results,
    gradient_job,
    job,
    require_gradients,
    require_same_future,
    require_weights,
    run_jobs,
)

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1000)]


@pytest.fixture(scope="module")
def four(work: Path) -> Results:
    return run_jobs(
        work,
        4,
        [
            *(
                gradient_job(f"four-{stage}-{size}", zero_stage=stage, expert_parallel=size)
                for stage, size in ((0, 2), (1, 2), (2, 2), (3, 2), (3, 4), (1, 4))
            ),
            *(
                gradient_job(f"clipped-{stage}", zero_stage=stage, expert_parallel=2, max_grad_norm=0.01)
                for stage in (0, 1, 2, 3)
            ),
            *(
                job(f"replayed-{stage}-{size}", zero_stage=stage, expert_parallel=size, replay=True, **REPLAY)
                for stage, size in ((3, 2), (1, 4))
            ),
            job("replayed-again", zero_stage=3, expert_parallel=2, activation_checkpointing=True, replay=True, **REPLAY),
            gradient_job("recomputed", zero_stage=3, expert_parallel=2, activation_checkpointing=True),
            job("four", zero_stage=3, expert_parallel=2, steps=2 + RESUMED_STEPS, save_after=2, export=True),
            job("half", zero_stage=2, expert_parallel=2, dtype="bfloat16", steps=3, save_after=2, export=True),
        ],
    )


def test_four_ranks_have_the_gradients_of_one_in_every_stage(work: Path, one: Results, four: Results) -> None:
    single = one[0]["single"]
    for name in ("four-0-2", "four-1-2", "four-2-2", "four-3-2", "four-3-4", "four-1-4", "recomputed"):
        assert four[0][name]["losses"] == pytest.approx(single["losses"], rel=1e-5), name
        assert four[0][name]["norms"] == pytest.approx(single["norms"], rel=1e-5), name
        require_gradients(work, name, "single")


def test_given_experts_are_used_on_all_ranks(work: Path, one: Results, four: Results) -> None:
    for name in ("replayed-3-2", "replayed-1-4", "replayed-again"):
        assert four[0][name]["losses"] == pytest.approx(one[0]["replayed"]["losses"], rel=1e-5), name
        require_gradients(work, name, "replayed")


def test_the_norm_that_clips_is_that_of_all_experts_on_all_ranks(work: Path, one: Results, four: Results) -> None:
    (norm,) = one[0]["single"]["norms"]
    assert norm > 0.02, "nothing would be clipped"
    for stage in (0, 1, 2, 3):
        assert four[3][f"clipped-{stage}"]["norms"] == pytest.approx([norm], rel=1e-5)
        require_gradients(work, f"clipped-{stage}", "single", scale=0.01 / (norm + 1e-6))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_run_of_four_ranks_continues_on_one_two_or_four(work: Path, four: Results, num_ranks: int) -> None:
    name = f"from-four-on-{num_ranks}"
    jobs = [job(name, zero_stage=3, resume="four", steps=RESUMED_STEPS, export=True)]
    results = run_jobs(work, num_ranks, jobs)
    require_same_future(results[-1][name], four[0]["four"], RESUMED_STEPS)
    require_weights(work, name, "four")


def test_a_bfloat16_run_continues_from_its_float32_masters(work: Path, four: Results) -> None:
    results = run_jobs(work, 2, [job("half-on-two", zero_stage=3, dtype="bfloat16", resume="half", steps=1)])
    assert results[0]["half-on-two"]["losses"] == pytest.approx(four[0]["half"]["losses"][-1:], abs=0.02)

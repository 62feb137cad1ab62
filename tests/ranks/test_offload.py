"""Optimizer and parameters in the host's memory, in every stage that can: gradients, clipping, the next steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.learner.parallel_jobs import (
    RESUMED_STEPS,
    Results,
    gradient_job,
    job,
    require_gradients,
    require_same_future,
    run_jobs,
)

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1000)]

BOTH = "optimizer_and_parameters"
LAYOUTS = [(1, 1, "optimizer"), (1, 2, "optimizer"), (2, 2, "optimizer"), (3, 2, "optimizer"), (3, 1, BOTH), (3, 2, BOTH)]
"""Stage, expert-parallel size, offload."""


@pytest.fixture(scope="module")
def two(work: Path) -> Results:
    jobs = [
        gradient_job(f"{stage}-{size}-{offload}", zero_stage=stage, expert_parallel=size, offload=offload)
        for stage, size, offload in LAYOUTS
    ]
    jobs += [
        gradient_job(
            f"offloaded-clipped-{stage}", zero_stage=stage, expert_parallel=2, offload="optimizer", max_grad_norm=0.01
        )
        for stage in (1, 3)
    ]
    jobs += [
        job("first", zero_stage=3, expert_parallel=2, offload=BOTH, steps=1, save_after=1),
        job("rest", zero_stage=2, offload="optimizer", resume="first", steps=RESUMED_STEPS),
    ]
    for stage, offload in ((1, "optimizer"), (3, BOTH)):
        jobs += [
            job(f"half-{stage}", zero_stage=stage, dtype="bfloat16", steps=2),
            job(f"half-{stage}-offloaded", zero_stage=stage, dtype="bfloat16", steps=2, offload=offload),
        ]
    return run_jobs(work, 2, jobs)


def test_gradients_are_those_of_one_process_that_keeps_everything(work: Path, one: Results, two: Results) -> None:
    for stage, size, offload in LAYOUTS:
        name = f"{stage}-{size}-{offload}"
        assert two[0][name]["offloaded"] == [True, offload == BOTH], name
        assert two[0][name]["losses"] == pytest.approx(one[0]["single"]["losses"], rel=1e-5), name
        assert two[0][name]["norms"] == pytest.approx(one[0]["single"]["norms"], rel=1e-5), name
        require_gradients(work, name, "single")


def test_the_norm_that_clips_is_that_of_all_ranks(work: Path, one: Results, two: Results) -> None:
    (norm,) = one[0]["single"]["norms"]
    for stage in (1, 3):
        assert two[1][f"offloaded-clipped-{stage}"]["norms"] == pytest.approx([norm], rel=1e-5)
        require_gradients(work, f"offloaded-clipped-{stage}", "single", scale=0.01 / (norm + 1e-6))


def test_a_run_that_changes_its_offload_continues_like_one_that_does_not(one: Results, two: Results) -> None:
    require_same_future(two[0]["rest"], one[0]["run"], RESUMED_STEPS)


def test_in_bfloat16_the_steps_equal_those_without_offload(two: Results) -> None:
    for stage in (1, 3):
        assert two[0][f"half-{stage}-offloaded"]["losses"] == pytest.approx(two[0][f"half-{stage}"]["losses"], abs=1e-4)
        assert two[0][f"half-{stage}-offloaded"]["norms"] == pytest.approx(two[0][f"half-{stage}"]["norms"], rel=1e-5)

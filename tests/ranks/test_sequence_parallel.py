"""Ranks that share each sequence's tokens: gradients in every stage and layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.conftest import REPLAY
from tests.support.learner.parallel_jobs import Results, gradient_job, job, require_gradients, run_jobs

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1000)]


@pytest.fixture(scope="module")
def two(work: Path) -> Results:
    return run_jobs(
        work,
        2,
        [
            *(
                gradient_job(f"sp2-{stage}-{experts}", sequence_parallel=2, zero_stage=stage, expert_parallel=experts)
                for stage in (0, 2, 3)
                for experts in (1, 2)
            ),
            gradient_job("sp2-again", sequence_parallel=2, zero_stage=3, expert_parallel=2, activation_checkpointing=True),
            gradient_job("sp2-penalised", sequence_parallel=2, zero_stage=2, penalties=True),
            job("sp2-replayed", sequence_parallel=2, zero_stage=3, replay=True, **REPLAY),
        ],
    )


@pytest.fixture(scope="module")
def four(work: Path) -> Results:
    return run_jobs(
        work,
        4,
        [
            *(
                gradient_job(f"sp2-of-4-{stage}", sequence_parallel=2, zero_stage=stage, expert_parallel=experts)
                for stage, experts in ((0, 1), (2, 2), (3, 2))
            ),
            # Two key heads, and four ranks.
            gradient_job("sp4", sequence_parallel=4, zero_stage=3, expert_parallel=2),
        ],
    )


def test_ranks_that_share_sequences_have_the_gradients_of_one(work: Path, one: Results, two: Results) -> None:
    single = one[0]["single"]
    for name in (*(f"sp2-{stage}-{experts}" for stage in (0, 2, 3) for experts in (1, 2)), "sp2-again"):
        assert two[1][name].get("error") is None, two[1][name]
        assert two[0][name]["losses"] == pytest.approx(single["losses"], rel=1e-5), name
        assert two[0][name]["norms"] == pytest.approx(single["norms"], rel=1e-5), name
        assert two[0][name]["experts"] == pytest.approx(single["experts"], rel=1e-6), name
        require_gradients(work, name, "single")


def test_two_pairs_of_ranks_train_other_sequences(work: Path, one: Results, four: Results) -> None:
    single = one[0]["single"]
    for name in ("sp2-of-4-0", "sp2-of-4-2", "sp2-of-4-3", "sp4"):
        assert four[3][name].get("error") is None, four[3][name]
        assert four[0][name]["losses"] == pytest.approx(single["losses"], rel=1e-5, abs=1e-7), name
        assert four[0][name]["experts"] == pytest.approx(single["experts"], rel=1e-6), name
        require_gradients(work, name, "single")


def test_given_experts_are_used_in_each_slice(work: Path, one: Results, two: Results) -> None:
    assert two[0]["sp2-replayed"]["losses"] == pytest.approx(one[0]["replayed"]["losses"], rel=1e-5)
    require_gradients(work, "sp2-replayed", "replayed")


def test_log_probs_of_the_start_and_of_the_reference_and_the_entropy_are_those_of_whole_rows(
    work: Path, two: Results
) -> None:
    alone = run_jobs(work, 1, [gradient_job("penalised", zero_stage=0, penalties=True)])
    assert two[0]["sp2-penalised"]["losses"] == pytest.approx(alone[0]["penalised"]["losses"], rel=1e-5)
    require_gradients(work, "sp2-penalised", "penalised")

"""Experts that an engine reported, for some of the sequences: every layout replays the same ones, and counts them alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.learner.parallel_jobs import Results, job, require_gradients, run_jobs

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1000)]

REPORTED = {"routing_replay": True, "replays_engine": True, "max_grad_norm": 0.0, "reported": True, "save_after": 1}


@pytest.fixture(scope="module")
def alone(work: Path) -> Results:
    return run_jobs(work, 1, [job("reported", zero_stage=0, **REPORTED)])


def test_one_rank_replays_what_is_known_and_counts_what_differs(alone: Results, one: Results) -> None:
    experts = alone[0]["reported"]["experts"]
    assert 0.3 < experts["experts_replayed/all"] < 0.7, "some sequences have reported experts, some have none"
    assert experts["experts_differ/all"] > 0.3, "they are not the routers' own"
    assert alone[0]["reported"]["losses"] != pytest.approx(one[0]["single"]["losses"], rel=1e-3)


@pytest.mark.parametrize(
    ("num_ranks", "layouts"),
    [
        (2, {"sp": {"sequence_parallel": 2, "zero_stage": 3}, "sp-ep": {"sequence_parallel": 2, "expert_parallel": 2}}),
        (
            4,
            {
                "ep": {"expert_parallel": 2, "zero_stage": 3, "activation_checkpointing": True},
                "ep-of-4": {"expert_parallel": 4, "zero_stage": 1},
                "sp-of-4": {"sequence_parallel": 2, "expert_parallel": 2, "zero_stage": 2},
            },
        ),
    ],
)
def test_ranks_replay_the_same_experts(
    work: Path, alone: Results, num_ranks: int, layouts: dict[str, dict[str, int]]
) -> None:
    found = run_jobs(
        work, num_ranks, [job(f"reported-{name}", **{"zero_stage": 0, **REPORTED, **own}) for name, own in layouts.items()]
    )
    single = alone[0]["reported"]
    for name in (f"reported-{layout}" for layout in layouts):
        assert found[-1][name].get("error") is None, found[-1][name]
        assert found[0][name]["losses"] == pytest.approx(single["losses"], rel=1e-5), name
        assert found[0][name]["experts"] == pytest.approx(single["experts"], rel=1e-6), name
        require_gradients(work, name, "reported")

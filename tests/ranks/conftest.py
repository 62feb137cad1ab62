"""One rank that keeps everything: the reference for several ranks, run once for the session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.learner.parallel_jobs import RESUMED_STEPS, Results, gradient_job, job, run_jobs
from tests.support.learner.training_groups import write_model_and_groups

REPLAY = {"routing_replay": True, "max_grad_norm": 0.0}


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and groups, and the results of all files' jobs, which have different names."""
    directory = tmp_path_factory.mktemp("ranks")
    write_model_and_groups(directory)
    return directory


@pytest.fixture(scope="session")
def one(work: Path) -> Results:
    """One step, one step with given experts, and a run of several."""
    return run_jobs(
        work,
        1,
        [
            gradient_job("single", zero_stage=0),
            job("replayed", zero_stage=0, replay=True, **REPLAY),
            job("run", zero_stage=1, steps=1 + RESUMED_STEPS),
        ],
    )

"""Rewards that torch, transformers and NumPy compute need no setting."""

import os
import tempfile
from pathlib import Path

import pytest

from gspo.tasks.environments import RewardJob
from gspo_services.tasks.environments import RewardPool, RewardPoolOptions
from tests.support.rewards.classifiers import official_score, save_classifier

pytestmark = pytest.mark.timeout(600)


def job(function: str, **task: str) -> RewardJob:
    arguments = {"completion": "four", "task": {"prompt": "2 + 2?", **task}}
    return RewardJob(function=f"tests.support.rewards.libraries:{function}", arguments=arguments, deadline_s=300)


async def test_numbers_of_libraries_and_a_classifier_are_rewards_by_default(tmp_path: Path) -> None:
    save_classifier(tmp_path)
    async with RewardPool(RewardPoolOptions(num_workers=1)) as pool:
        for function, reward in (("of_numpy", 0.5), ("of_torch", 0.5), ("a_tensor", 0.5)):
            result = await pool.grade(job(function))
            assert (result.reward, result.failure) == (reward, None), result
        result = await pool.grade(job("of_classifier", rm=str(tmp_path)))
        assert result.reward == pytest.approx(official_score(tmp_path, "2 + 2?four"), abs=1e-4), result


async def test_a_worker_has_a_folder_that_goes_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    async with RewardPool(RewardPoolOptions(num_workers=1)) as pool:
        assert (await pool.grade(job("of_temporary_files"))).reward == 1.0
        assert len(os.listdir(tmp_path)) == 1
    assert os.listdir(tmp_path) == []

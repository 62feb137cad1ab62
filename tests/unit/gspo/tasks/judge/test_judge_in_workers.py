"""Judges asked from reward workers, with what [reward] gives them and without."""

from pathlib import Path
from typing import Any

import pytest

from gspo.tasks.environments import RewardJob
from gspo_services.tasks.environments import RewardPool, RewardPoolOptions
from tests.support.rewards.judges import judged

OPTIONS: dict[str, Any] = {"network": True, "scratch": True, "environment": {"OPENAI_API_KEY": "secret"}}


def asking(url: str, text: str = "good?", folder: Path | None = None) -> RewardJob:
    arguments = {"text": text, "url": url, "folder": None if folder is None else str(folder)}
    return RewardJob(function="tests.support.rewards.judges:asks", arguments=arguments, deadline_s=120)


async def test_workers_share_a_judges_answers_and_keep_their_connections(tmp_path: Path) -> None:
    async with judged() as (fake, url), RewardPool(RewardPoolOptions(num_workers=2, **OPTIONS)) as pool:
        first = await pool.grade(asking(url, folder=tmp_path))
        assert (first.reward, first.detail) == (1.0, "")
        assert (await pool.grade(asking(url, folder=tmp_path))).reward == 1.0
        assert (await pool.grade(asking(url, "another", folder=tmp_path))).reward == 2.0
        assert fake.keys == ["Bearer secret"] * 2
        assert len(set(fake.ports)) == 1, "the worker that became free last serves first, over the same connection"


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        ("network", "cannot be reached"),
        ("scratch", "cannot be written to: set reward.scratch = true"),
        ("environment", "name it in reward.variables"),
    ],
)
async def test_what_a_judge_lacks_is_named(tmp_path: Path, missing: str, text: str) -> None:
    options = {name: value for name, value in OPTIONS.items() if name != missing}
    async with judged() as (_, url), RewardPool(RewardPoolOptions(num_workers=1, **options)) as pool:
        result = await pool.grade(asking(url, folder=tmp_path))
    if missing == "network" and result.reward is not None:
        pytest.skip("reward workers keep the network here")
    assert (result.reward, result.failure, text in result.detail) == (None, "raised", True), result
    assert "JudgeError" in result.detail

"""The rewards that docs/guide/rewards.md shows work as shown."""

import json
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from aiohttp import web

from gspo.tasks.environments import Environment, RewardJob
from gspo_services.shared.settings import Settings
from gspo_services.tasks.environments import RewardPool, RewardPoolOptions, create_environment
from gspo_services.tasks.environments.reward_pool import RewardResult
from gspo_services.tasks.environments.reward_results import FailureReason
from tests.support.pages import shown
from tests.support.rewards.judges import completion, judged
from tests.support.rewards.services import served

PAGE = Path(__file__).parents[3] / "docs" / "guide" / "rewards.md"
TASK = {"prompt": "2 + 2?", "answer": "4"}


def block(first_line: str) -> str:
    return shown(f"docs/guide/{PAGE.name}", first_line)


def environment_of(function: str, folder: Path, **options: Any) -> Environment:
    """The dataset environment with a module of the page in the working directory."""
    (folder / "row.jsonl").write_text('{"question": "2 + 2?", "answer": "#### 4", "level": 1}')
    name = "reward_url" if function.startswith("http") else "reward"
    return create_environment("dataset", {"train_path": str(folder / "row.jsonl"), name: function, **options})


def job_of(environment: Environment, text: str, **task: Any) -> RewardJob:
    reward = environment.step({}, text).reward
    assert isinstance(reward, RewardJob)
    return reward.for_task({**TASK, **task})


async def graded(job: RewardJob, environment: Environment, **options: Any) -> RewardResult:
    async with RewardPool(RewardPoolOptions(num_workers=1, **options), environment.reward_functions) as pool:
        return await pool.grade(job)


async def test_a_function_grades_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text(block("# my_rewards.py"))
    shown = tomllib.loads(block('name = "dataset"').replace("[environment.options]", "[options]"))
    assert shown["name"] == "dataset"
    options = shown["options"] | {"train_path": "row.jsonl", "reward_deadline_s": 60}
    (tmp_path / "row.jsonl").write_text('{"question": "2 + 2?", "answer": "#### 4", "level": 1}')
    environment = create_environment("dataset", options)
    assert environment.tasks("train").task(0) == {**TASK, "level": 1}
    result = await graded(job_of(environment, "It is 4."), environment)
    assert (result.reward, result.components) == (1.1, {"right": 1.0, "short": 1.0})


async def test_a_function_compares_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_groups.py").write_text(block("# my_groups.py"))
    settings = Settings.model_validate({"reward": tomllib.loads(block('group = "my_groups:beside"'))}).reward
    answers: list[Any] = ["It is 4", "4", "It is 5"]
    job = RewardJob(
        function=settings.group,
        arguments={"completions": answers, "task": {}, "rewards": [1.0, 1.0, 0.0]},
        weights=settings.group_weights,
        deadline_s=settings.group_deadline_s,
    )
    async with RewardPool(RewardPoolOptions(num_workers=1)) as pool:
        await pool.require_group(settings.group)
        result = await pool.grade(job, len(answers))
    assert [each.reward for each in result.of_answers] == [1.1, 1.1, 0.2]


@pytest.mark.parametrize(
    ("code", "reward"),
    [
        ("def add(a, b):\n    return a + b", 1.0),
        ("def add(a, b):\n    return a - b", 0.0),
        ("import sys\nsys.exit(0)", 0.0),
        ("while True:\n    print('x' * 1000)", 0.0),
        ("import os\nos.kill(os.getpid(), 9)", 0.0),
    ],
    ids=["right", "wrong", "leaves", "floods", "dies"],
)
async def test_code_of_the_policy_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, reward: float) -> None:
    monkeypatch.chdir(tmp_path)
    text = block("# my_code_rewards.py")
    (tmp_path / "my_code_rewards.py").write_text(text)
    environment = environment_of("my_code_rewards:grade", tmp_path, reward_deadline_s=60)
    job = job_of(environment, f"So:\n```python\n{code}\n```", tests="assert add(2, 2) == 4")
    result = await graded(job, environment, scratch=True, scratch_file_bytes=2**20)
    assert (result.reward, result.failure) == (reward, None), result


async def test_a_judge_grades(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_judge.py").write_text(block("# my_judge.py"))
    configured = Settings.model_validate(tomllib.loads(block("# run.toml"))).reward
    assert (configured.workers, configured.network, configured.scratch) == (32, True, True)
    environment = environment_of("my_judge:grade", tmp_path, reward_deadline_s=60)
    async with judged() as (fake, url):
        fake.script = [(429, "slower"), (200, completion("7"))]
        variables = {**dict.fromkeys(configured.variables, "secret"), "OPENAI_BASE_URL": url}
        async with RewardPool(
            RewardPoolOptions(num_workers=2, network=True, scratch=True, environment=variables), environment.reward_functions
        ) as pool:
            results = [await pool.grade(job_of(environment, "It is 4.")) for _ in range(2)]
    assert [result.reward for result in results] == [0.7, 0.7], results
    assert len(fake.requests) == 2, "the answer is kept"
    assert fake.requests[0]["messages"][1]["content"] == "Question: 2 + 2?\n\nAnswer: It is 4."


def test_a_reward_model_and_a_function_of_verl_are_named_as_shown(tmp_path: Path) -> None:
    shown = Settings.model_validate(tomllib.loads("[environment.options]\n" + block('train_path = "data/prompts.jsonl"')))
    assert create_environment("dataset", shown.environment.options).needs_reward_model
    assert (shown.reward.model, shown.reward.model_device) == ("models/reward-model", "cuda:7")
    of_verl = tomllib.loads(block('train_path = "data/train.parquet"'))
    (sample,) = create_environment("dataset", of_verl).reward_functions
    assert isinstance(sample, RewardJob)
    assert (sample.function, sample.counted) == ("my_scores:compute_score", {"score": 1.0})


async def test_a_service_grades(tmp_path: Path) -> None:
    asked, answered = (json.loads(each.split("\n")[1]) for each in block("POST /grade").strip().split("\n\n"))
    got: list[Any] = []

    async def grade(request: web.Request) -> web.Response:
        got.append(await request.json())
        return web.json_response(answered)

    async with served(grade, "/grade") as url:
        environment = environment_of(url, tmp_path, reward_weights={"right": 1.0, "short": 0.1})
        result = await graded(job_of(environment, "It is 4."), environment)
    assert (result.reward, got) == (1.1, [asked])


def test_the_page_has_every_reason_of_a_worker() -> None:
    page = PAGE.read_text(encoding="utf-8")
    missing = [reason for reason in get_args(FailureReason) if f"`{reason}`" not in page]
    assert missing == ["closed"], "which is a rollout that ends"

"""Rows that a reward of the user's own grades: what it gets, and options that do not fit together."""

import datetime
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from gspo.tasks.environments import RewardJob, Step
from gspo.tasks.maths import GRADE_ANSWER
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.tasks.environments import RewardPool, RewardPoolOptions, create_environment

OWN = "tests.support.reward_functions:graded_row"
ROW = {"question": "1+1?", "answer": "so #### 2", "tests": ["a", {"b": 1}], "level": 3}


def rows_file(folder: Path, *rows: object) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def job_of(step: Step) -> RewardJob:
    assert isinstance(step.reward, RewardJob)
    return step.reward


async def test_a_function_gets_the_completion_and_the_row_and_its_components_have_weights(tmp_path: Path) -> None:
    options = {
        "train_path": rows_file(tmp_path, ROW), "task_columns": ["tests", "level"], "reward": OWN,
        "reward_weights": {"right": 2.0, "short": 0.5}, "reward_deadline_s": 30,
    }  # fmt: skip
    environment = create_environment("dataset", options)
    task = environment.tasks("train").task(0)
    assert task == {"prompt": "1+1?", "answer": "2", "tests": ["a", {"b": 1}], "level": 3}
    state = environment.start(task, seed=0).state
    assert state == {}, "a state travels with every chunk"
    step = environment.step(state, "it is #### 2")
    assert step.done
    async with RewardPool(RewardPoolOptions(num_workers=1), environment.reward_functions) as pool:
        result = await pool.grade(job_of(step).for_task(task))
    # The whole completion, not what follows the marker.
    assert (result.reward, result.components) == (2.0 + 0.5 * 12, {"right": 1.0, "short": 12.0, "level": 3.0})


def test_the_deadline_and_the_service_reach_the_job() -> None:
    environment = create_environment("dataset", {"reward_url": "http://rewards:8080/grade", "reward_deadline_s": 77})
    job = job_of(environment.step({}, "x"))
    assert (job.url, job.function, job.deadline_s, job.with_task) == ("http://rewards:8080/grade", "", 77.0, True)
    assert environment.reward_functions == ()
    assert create_environment("dataset", {}).reward_functions == (GRADE_ANSWER,)
    (sample,) = create_environment("dataset", {"reward": OWN, "task_columns": ["level"]}).reward_functions
    assert isinstance(sample, RewardJob)
    assert (sample.function, sample.arguments["task"]) == (OWN, {"prompt": None, "answer": None, "level": None})


def test_rows_need_no_answer_when_a_reward_of_ones_own_grades(tmp_path: Path) -> None:
    path = rows_file(tmp_path, {"question": "x", "answer": {"no": "answer"}})
    options = {"train_path": path, "reward": OWN}
    assert create_environment("dataset", options).tasks("train").task(0) == {"prompt": "x"}
    path = rows_file(tmp_path, {"question": "x", "answer": ["several", "answers"]})
    task = create_environment("dataset", options).tasks("train").task(0)
    assert task == {"prompt": "x", "answer": ["several", "answers"]}
    options |= {"task_columns": ["answer"]}
    task = create_environment("dataset", options).tasks("train").task(0)
    assert task == {"prompt": "x", "answer": ["several", "answers"]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "x"}, 'no column "tests": there are question (task_columns says which to use)'),
        ({"question": "x", "tests": 10**30}, 'column "tests" holds a number of more than 64 bits'),
        ({"question": "x", "tests": "t" * 600_000}, "the row has 600021 bytes, 524288 allowed"),
    ],
)
def test_a_row_whose_task_cannot_travel_is_bad(tmp_path: Path, row: object, reason: str) -> None:
    options = {"reward": OWN, "answer_column": "", "task_columns": ["tests"], "train_path": rows_file(tmp_path, row)}
    with pytest.raises(ValueError) as refusal:
        create_environment("dataset", options).tasks("train")
    assert f"rows.jsonl, line 1: {reason}" in str(refusal.value)


def test_a_column_of_parquet_that_is_no_plain_data_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    table = pyarrow.table({"question": ["x"], "when": [datetime.date(2026, 1, 1)]})
    pyarrow.parquet.write_table(table, path)
    options = {"reward": OWN, "answer_column": "", "task_columns": ["when"], "train_path": str(path)}
    with pytest.raises(ValueError, match='row 1: column "when" holds a date: expected None, bool'):
        create_environment("dataset", options).tasks("train")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"reward": OWN, "reward_url": "http://x"}, "a function or a service grades, not both"),
        ({"reward": "my_rewards"}, 'reward is "my_rewards": expected "package.module:function"'),
        ({"reward": "http://x/y"}, "a service is named by reward_url"),
        ({"reward_url": "rewards:8080"}, 'reward_url is "rewards:8080": expected a URL'),
        ({"reward_url": "http://"}, "expected a URL"),
        ({"reward_url": "http://x:99999/"}, "expected a URL"),
        ({"task_columns": ["answer"]}, "task_columns has answer, which the task holds already"),
        ({"reward_weights": {"right": 1.0}}, "are for a reward of your own, and there is none: set reward"),
        ({"reward": OWN, "reward_weights": {}}, "every reward would be 0"),
        ({"reward": OWN, "reward_weights": {"right": "much"}}, "reward_weights"),
        ({"reward": OWN, "task_columns": ["prompt"]}, "task_columns has prompt, which the task holds already"),
        (
            {"reward": OWN, "answer_column": "a", "task_columns": ["answer", "x"]},
            "task_columns has answer, which the task holds already",
        ),
    ],
)
def test_options_of_a_reward_that_do_not_fit_together_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as refusal:
        create_environment("dataset", options)
    assert text in str(refusal.value)


def test_rows_without_an_answer_and_a_reward_are_for_a_reward_model(tmp_path: Path) -> None:
    options = {"train_path": rows_file(tmp_path, {"question": "x"}), "answer_column": ""}
    environment = create_environment("dataset", options)
    assert (environment.needs_reward_model, environment.reward_functions) == (True, ())
    task = environment.tasks("train").task(0)
    state = environment.start(task, seed=0).state
    assert (task, state, environment.step(state, "four").reward) == ({"prompt": "x"}, {}, 0.0)
    assert not create_environment("dataset", {}).needs_reward_model
    assert not create_environment("dataset", {"answer_column": "", "reward": OWN}).needs_reward_model


async def test_a_reward_that_cannot_be_imported_is_said_before_anything_is_sampled() -> None:
    environment = create_environment("dataset", {"reward": "tests.support.reward_functions:gone"})
    with pytest.raises(ConfigurationError, match=r"reward_functions:gone.* cannot be used"):
        async with RewardPool(RewardPoolOptions(num_workers=1), environment.reward_functions):
            raise AssertionError("the pool has opened")


def test_rows_that_only_a_group_grades_are_worth_0_alone_and_are_not_evaluated(tmp_path: Path) -> None:
    path = rows_file(tmp_path, {"question": "x"})
    options = {"train_path": path, "eval_path": path, "answer_column": "", "graded_alone": False}
    environment = create_environment("dataset", options)
    assert environment.start(environment.tasks("train").task(0), seed=0).state == {}
    assert environment.step({}, "anything").reward == 0.0
    assert environment.reward_functions == ()
    with pytest.raises(ValueError, match="evaluations grade each answer alone"):
        environment.tasks("eval")
    with pytest.raises(ValueError, match='graded_alone is false and reward is "tests'):
        create_environment("dataset", {**options, "reward": OWN})

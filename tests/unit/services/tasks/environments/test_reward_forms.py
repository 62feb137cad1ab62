"""Functions that were written for verl and TRL, unchanged: called as there, and worth what they are worth there."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gspo.tasks.environments import RewardJob
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.tasks.environments import RewardPool, RewardPoolOptions, create_environment
from gspo_services.tasks.environments.reward_results import RewardResult
from gspo_services.tasks.reward_worker.worker import grade

FOREIGN = "tests.support.rewards.foreign"
OF_VERL = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": "2 + 2?"}],
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 7, "split": "train"},
}
VERL = {"prompt_column": "prompt", "answer_column": "", "answer_marker": "", "system_prompt": "", "reward_form": "verl"}
TRL = {"prompt_column": "prompt", "answer_column": "", "reward_form": "trl"}
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[RewardPool]:
    async with RewardPool(RewardPoolOptions(num_workers=1)) as pool:
        yield pool


async def graded(
    pool: RewardPool, folder: Path, row: Any, function: str, options: dict[str, Any], said: str, ids: tuple[int, ...] = ()
) -> RewardResult:
    """What ``said`` is worth: the row goes through the dataset environment, and its function through a worker's checks."""
    (folder / "rows.jsonl").write_text(json.dumps(row))
    options = {"train_path": str(folder / "rows.jsonl"), "reward": f"{FOREIGN}:{function}", **options}
    environment = create_environment("dataset", {**options, "reward_deadline_s": 60})
    task = environment.tasks("train").task(0)
    job = environment.step({}, said).reward
    assert isinstance(job, RewardJob)
    for wanted in environment.reward_functions:
        await pool._require(wanted)
    return await pool.grade(job.for_task(task).for_turn(ids))


async def test_verls_score_is_the_reward_and_the_rest_is_reported(pool: RewardPool, tmp_path: Path) -> None:
    right = await graded(pool, tmp_path, OF_VERL, "compute_score", VERL, "It is 4")
    assert right == RewardResult(
        reward=1.0, components={"score": 1.0, "acc": 1.0, "index": 7.0, "turns": 2.0, "of_math": 1.0}
    ), "text and names that no metric has are left out"
    wrong = await graded(pool, tmp_path, OF_VERL, "compute_score", VERL, "It is 5")
    assert (wrong.reward, wrong.components["acc"]) == (-1.0, 0.0)


async def test_a_score_of_one_with_an_accuracy_is_worth_one(pool: RewardPool, tmp_path: Path) -> None:
    result = await graded(pool, tmp_path, OF_VERL, "accuracy_is_score", VERL, "4")
    assert (result.reward, result.components) == (1.0, {"score": 1.0, "acc": 1.0})


async def test_rows_of_other_layouts_have_their_answer_as_ground_truth(pool: RewardPool, tmp_path: Path) -> None:
    row = {"question": "2 + 2?", "answer": "so #### 4"}
    for function, reward in (("number_of_verl", 0.25), ("of_two", 1.0)):
        result = await graded(pool, tmp_path, row, function, {"reward_form": "verl"}, "4")
        assert (result.reward, result.components) == (reward, {"score": reward})


async def test_a_dict_without_verls_score_is_a_failure_that_names_its_keys(pool: RewardPool, tmp_path: Path) -> None:
    result = await graded(pool, tmp_path, OF_VERL, "without_score", VERL, "4")
    assert (result.failure, '"score"; this dict has "acc", "reward"' in result.detail) == ("missing_component", True), result


@pytest.mark.parametrize(
    ("row", "function", "options", "reward"),
    [
        # A prompt that is text has texts as completions, a conversation has messages.
        ({"prompt": "2 + 2?"}, "longer", {}, 20.0),
        ({"prompt": OF_VERL["prompt"]}, "longer", {}, 1.0),
        ({"prompt": OF_VERL["prompt"]}, "format_reward", {}, 1.0),
        ({"prompt": "2 + 2?"}, "format_reward", {"reward_form": "trl_chat"}, 1.0),
        ({"prompt": "2 + 2?"}, "slow", {"reward_form": "trl_chat"}, 1.0),
        ({"prompt": "x", "ground_truth": "<think>x</think> four"}, "by_column", {"task_columns": ["ground_truth"]}, 0.0),
        ({"prompt": "x", "ground_truth": "<think> </think>four"}, "by_column", {"task_columns": ["ground_truth"]}, 1.0),
        ({"prompt": "x", "task": "math"}, "for_maths_alone", {"task_columns": ["task"]}, 1.0),
        ({"prompt": "x"}, "by_tokens", {}, 3.0),
    ],
)
async def test_trls_functions_get_lists_of_one(
    pool: RewardPool, tmp_path: Path, row: Any, function: str, options: dict[str, Any], reward: float
) -> None:
    result = await graded(pool, tmp_path, row, function, TRL | options, "<think> </think>four", (5, 6, 7))
    assert (result.reward, result.failure, result.components) == (reward, None, {}), result


@pytest.mark.parametrize(
    ("function", "row", "options", "reason", "detail"),
    [
        ("for_maths_alone", {"task": "code"}, {"task_columns": ["task"]}, "no_reward", "returned None"),
        ("two_for_one", {}, {}, "not_finite", "got 1 completion and returned 2 rewards (list)"),
        ("one_number", {}, {}, "not_finite", "got 1 completion and returned 1.0 (float)"),
        ("format_reward", {}, {}, "raised", "TypeError"),
    ],
)
async def test_what_trl_would_not_take_is_a_failure(
    pool: RewardPool, tmp_path: Path, function: str, row: Any, options: dict[str, Any], reason: str, detail: str
) -> None:
    result = await graded(pool, tmp_path, {"prompt": "x"} | row, function, TRL | options, "four")
    assert (result.reward, result.failure, detail in result.detail) == (None, reason, True), result


ROW = {"completion": "", "completion_ids": [], "task": {"prompt": "", "answer": "5", "reward_model": {"ground_truth": "4"}}}


@pytest.mark.parametrize(
    ("form", "value"),
    [("verl", None), ("verl", {"score": None}), ("verl", {"score": "1"}), ("verl", []),
     ("trl", None), ("trl", b"1"), ("trl", {1: 0.5}), ("trl", ["1"]), ("trl", [[1.0]])],
)  # fmt: skip
async def test_what_looks_like_a_score_is_none(form: str, value: Any) -> None:
    result = grade(lambda: value, ROW, asyncio.Runner(), form)
    assert result["failure"] == "not_finite"


class Leaves:
    def __iter__(self) -> Iterator[float]:
        sys.exit(3)


@pytest.mark.parametrize(("form", "size"), [("trl", None), ("", 2)])
async def test_a_list_whose_own_code_leaves_is_a_failure(form: str, size: int | None) -> None:
    result = grade(lambda **_: Leaves(), ROW, asyncio.Runner(), form, size)
    assert (result["failure"], "SystemExit: 3" in result["detail"]) == ("raised", True), result


async def test_a_row_says_its_ground_truth_itself_and_a_score_comes_with_as_much_as_a_metric_holds() -> None:
    """The row has an answer, too, and the function returns more numbers than a reward has components."""

    def score(ground_truth: str) -> dict[str, float]:
        return {**{f"n{number}": number for number in range(40)}, "score": float(ground_truth)}

    components = grade(score, ROW, asyncio.Runner(), "verl")["components"]
    assert components == {"score": 4.0, **{f"n{number}": number for number in range(15)}}


@pytest.mark.parametrize(
    ("function", "options", "text"),
    [
        ("compute_score", {}, 'environment.options.reward_form = "verl"'),
        ("longer", {}, 'environment.options.reward_form = "trl"'),
        ("longer", {"reward_form": "verl"}, 'environment.options.reward_form = "trl"'),
        (
            "by_column",
            {"reward_form": "trl"},
            "Columns of the rows are ground_truth: name them in environment.options.task_columns",
        ),
        ("of_a_trainer", {"reward_form": "trl"}, "takes trainer_state, which only TRL's trainer has: give it a default"),
    ],
)
async def test_a_function_of_another_form_is_said_before_anything_is_sampled(
    pool: RewardPool, function: str, options: dict[str, Any], text: str
) -> None:
    environment = create_environment("dataset", {"reward": f"{FOREIGN}:{function}", **options})
    with pytest.raises(ConfigurationError) as refusal:
        await pool._require(environment.reward_functions[0])
    assert text in str(refusal.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"reward_form": "verl"}, 'reward_form is "verl" and reward names no function'),
        ({"reward_form": "trl", "reward_url": "http://x"}, "reward names no function"),
        ({"reward_form": "slime", "reward": "a:b"}, "reward_form"),
        ({"reward_form": "trl", "reward": "a:b", "reward_weights": {"x": 1.0}}, "leave reward_weights out"),
    ],
)
async def test_a_form_that_does_not_fit_the_other_options_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as refusal:
        create_environment("dataset", options)
    assert text in str(refusal.value)

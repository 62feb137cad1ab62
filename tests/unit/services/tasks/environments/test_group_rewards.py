"""Functions that compare all answers of a group: what they get, what they may return, and what is a failure."""

from typing import Any

import msgpack
import pytest

from gspo.tasks.environments import RewardJob
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.tasks.environments import RewardPool, RewardPoolOptions, RewardResult
from gspo_services.tasks.worker.frames import LENGTH

TAKEN = {
    "[1, 2.5]": [1.0, 2.5],
    "(True, False)": [1.0, 0.0],
    "__import__('numpy').array([0.25, 4])": [0.25, 4.0],
    "(x / 2 for x in (1, 2))": [0.5, 1.0],
}
"""What a function returns for two answers, as Python, and their rewards."""
REFUSED = {
    "[1.0]": ("wrong_length", "returned 1 rewards: expected a list of 2, one for each answer"),
    "[1.0, 2.0, 3.0]": ("wrong_length", "returned 3 rewards: expected a list of 2"),
    "[]": ("wrong_length", "returned 0 rewards"),
    "1.0": ("wrong_length", "returned a value of type float: expected a list of 2"),
    "None": ("wrong_length", "type NoneType"),
    "'ab'": ("wrong_length", "type str"),
    "{1.0, 2.0}": ("wrong_length", "type set"),
    "{'a': 1, 'b': 2}": ("wrong_length", "type dict"),
    "[1.0, float('nan')]": ("not_finite", "answer 1 of 2: the reward is nan (float)"),
    "[1.0, 10**400]": ("not_finite", "answer 1 of 2"),
    "['1', 1.0]": ("not_finite", "answer 0 of 2: the reward is '1' (str)"),
    "__import__('numpy').ones((2, 1))": ("not_finite", "answer 0 of 2"),
    "[{}, 1.0]": ("missing_component", "answer 0 of 2"),
    "[1.0, {'a b': 1.0}]": ("bad_component", "answer 1 of 2"),
    "1 / 0": ("raised", "ZeroDivisionError"),
    "__import__('sys').exit(3)": ("raised", "SystemExit"),
}
"""The same, with the failure and a part of its detail."""


def path(name: str) -> str:
    return f"tests.support.reward_functions:{name}"


def job(name: str, *completions: str, task: dict[str, Any] | None = None, **changes: Any) -> RewardJob:
    arguments: dict[str, Any] = {
        "completions": list(completions), "task": task or {}, "rewards": [0.5] * len(completions)
    }  # fmt: skip
    return RewardJob(function=path(name), arguments=arguments, deadline_s=30.0, **changes)


async def compared(job: RewardJob, **options: Any) -> RewardResult:
    async with RewardPool(RewardPoolOptions(num_workers=1, **options)) as pool:
        return await pool.grade(job, len(job.arguments["completions"]))  # type: ignore[arg-type]


async def test_each_answer_has_its_reward_and_its_components() -> None:
    result = await compared(job("beside", "four", "2", "12", weights={"alone": 1.0, "shorter": 10.0}))
    assert result.failure is None, result
    assert [(each.reward, each.components) for each in result.of_answers] == [
        (0.5, {"alone": 0.5, "shorter": 0.0}),
        (20.5, {"alone": 0.5, "shorter": 2.0}),
        (10.5, {"alone": 0.5, "shorter": 1.0}),
    ]


async def test_a_function_gets_what_answers_are_worth_alone_only_if_it_asks() -> None:
    async with RewardPool(RewardPoolOptions(num_workers=1)) as pool:
        plain = await pool.grade(job("rank", "b", "a", "c"), 3)
        later = await pool.grade(job("rank_later", "b", "a"), 2)
    assert [each.reward for each in plain.of_answers] == [1.0, 0.0, 2.0]
    assert [each.reward for each in later.of_answers] == [2.0, 0.0]


async def test_any_ordered_numbers_are_taken_and_anything_else_is_a_failure_with_its_reason() -> None:
    found = {}
    async with RewardPool(RewardPoolOptions(num_workers=1)) as pool:
        for value in (*TAKEN, *REFUSED):
            found[value] = await pool.grade(job("as_it_says", value, ""), 2)
    assert {value: [each.reward for each in found[value].of_answers] for value in TAKEN} == TAKEN
    for value, (reason, detail) in REFUSED.items():
        result = found[value]
        assert (result.reward, result.of_answers, result.failure) == (None, [], reason), value
        assert detail in result.detail, value


async def test_a_weight_needs_its_component_in_every_answer() -> None:
    result = await compared(job("as_it_says", "[{'a': 1.0}, {'b': 1.0}]", "", weights={"a": 1.0}))
    assert (result.failure, result.of_answers) == ("missing_component", [])
    assert 'lacks "a"' in result.detail


async def test_a_comparison_over_its_deadline_is_never_worth_0() -> None:
    slow = RewardJob(function=path("hang_together"), arguments={"completions": ["a"], "task": {}}, deadline_s=0.2)
    async with RewardPool(RewardPoolOptions(num_workers=1, on_deadline="zero")) as pool:
        result = await pool.grade(slow, 1)
        assert (result.reward, result.of_answers, result.failure) == (None, [], "deadline")
        again = await pool.grade(job("rank", "b", "a"), 2)
    assert [each.reward for each in again.of_answers] == [1.0, 0.0], "the next one gets a new worker"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("missing", 'no function called "missing"'),
        ("of_others", "takes (texts: list[str]) -> list[float]: as reward.group it"),
    ],
)
async def test_a_function_that_cannot_compare_is_found_at_the_start(name: str, text: str) -> None:
    async with RewardPool(RewardPoolOptions(num_workers=1)) as pool:
        for fitting in ("rank", "beside", "rank_later"):
            await pool.require_group(path(fitting))
        with pytest.raises(ConfigurationError) as raised:
            await pool.require_group(path(name))
    assert text in str(raised.value)


@pytest.mark.parametrize("false", [{"reward": 1.0}, {"rewards": [1.0, {"a": "1"}]}, {"rewards": [{}] * 3}])
async def test_what_reward_code_writes_into_the_pipe_is_checked(false: dict[str, Any]) -> None:
    body = msgpack.packb(false)
    lying = job("answer_together", "a", "b", task={"body": LENGTH.pack(len(body)) + body})
    async with RewardPool(RewardPoolOptions(num_workers=1)) as pool:
        result = await pool.grade(lying, 2)
        assert (result.of_answers, result.failure) == ([], "crashed"), result
        assert [each.reward for each in (await pool.grade(job("rank", "b", "a"), 2)).of_answers] == [1.0, 0.0]

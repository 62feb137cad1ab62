"""A reward is the same through every door: functions, agents, services, programs, and the step of an environment."""

import asyncio
import json
import sys
from typing import Any

import pytest
from aiohttp import web

from gspo.tasks.environments import RewardJob
from gspo_services.tasks.agents import AgentProgram, AgentResult, AgentService
from gspo_services.tasks.environments.reward_pool import RewardPool, RewardPoolOptions
from gspo_services.tasks.environments.reward_results import RewardResult
from tests.support.agent_pools import agent_pool, agent_task
from tests.support.rewards.services import served
from tests.support.rewards.values import COMPONENTS, GOOD, SEVENTEEN, SIXTEEN, WRONG, WRONG_COMPONENTS

TOO_MANY = "17 components, 16 allowed (MAX_COMPONENTS)"
JSON_GOOD = {
    "1": 1.0, "true": 1.0, "0.25": 0.25, '{"reward": 2}': 2.0, '{"a": 1, "b": 0.25}': 1.25, '{"reward": {"reward": 1}}': 1.0,
    json.dumps(SIXTEEN): 16.0,
}  # fmt: skip
JSON_WRONG = {
    "null": ("not_finite", "the reward is None (NoneType): expected a finite number"),
    '{"reward": "1"}': ("not_finite", "the reward is '1' (str)"),
    "[1]": ("not_finite", "the reward is [1] (list)"),
    '{"reward": ' + "9" * 400 + "}": ("not_finite", "a float holds up to"),
    "{}": ("missing_component", "no components"),
    '{"a": null}': ("not_finite", 'component "a" of the reward is None (NoneType)'),
    '{"a b": 1}': ("bad_component", "'a b' (str)"),
    '{"reward": ' + json.dumps(SEVENTEEN) + "}": ("bad_component", TOO_MANY),
}


def disagreement(found: RewardResult | AgentResult, expected: Any) -> Any:
    """None for a result as the table has it: a reward, or a reason and words of the detail."""
    if isinstance(expected, float):
        return None if (found.reward, found.failure) == (expected, None) else found
    reason, words = expected
    return None if (found.reward, found.failure) == (None, reason) and words in found.detail else found


CASES = [
    *(("good", name, reward) for name, (_, reward) in GOOD.items()),
    *(("wrong", name, tuple(why)) for name, (_, *why) in WRONG.items()),
    *(("components", name, 1.25) for name in COMPONENTS),
    *(("wrong components", name, tuple(why)) for name, (_, *why) in WRONG_COMPONENTS.items()),
    ("count", "16", 16.0),
    ("count", "17", ("bad_component", TOO_MANY)),
]


async def test_a_reward_function_may_return_any_finite_number() -> None:
    async with RewardPool(RewardPoolOptions(num_workers=1)) as pool:
        found = {
            (table, name): await pool.grade(
                RewardJob(function="tests.support.rewards.values:grade", arguments={"table": table, "name": name})
            )
            for table, name, _ in CASES
        }
    wrong = {(table, name): disagreement(found[table, name], expected) for table, name, expected in CASES}
    assert {case: result for case, result in wrong.items() if result is not None} == {}


async def test_a_worker_goes_on_after_a_value_that_is_no_reward() -> None:
    async with RewardPool(RewardPoolOptions(num_workers=1)) as pool:
        workers = [(await pool.grade(RewardJob(function="tests.support.reward_functions:process_id", arguments={}))).reward]
        for table, name in (("wrong", "exits"), ("wrong components", "none"), ("count", "17")):
            arguments = {"table": table, "name": name}
            await pool.grade(RewardJob(function="tests.support.rewards.values:grade", arguments=arguments))
            process_id = RewardJob(function="tests.support.reward_functions:process_id", arguments={})
            workers.append((await pool.grade(process_id)).reward)
    assert len(set(workers)) == 1
    assert workers[0] is not None


async def test_an_agent_may_return_any_finite_number() -> None:
    async with agent_pool("tests.support.rewards.values:solve") as pool:
        found = await asyncio.gather(*(pool.solve(agent_task("any", table=table, name=name)) for table, name, _ in CASES))
    wrong = {(table, name): disagreement(each, expected) for each, (table, name, expected) in zip(found, CASES, strict=True)}
    assert {case: result for case, result in wrong.items() if result is not None} == {}


async def test_the_json_of_a_service_is_read_as_a_reward() -> None:
    bodies: dict[str, Any] = {**JSON_GOOD, **JSON_WRONG}

    async def handle(request: web.Request) -> web.Response:
        asked = await request.json()
        return web.Response(text=asked["body"] if "body" in asked else asked["task"]["body"])

    async with served(handle) as url, RewardPool() as pool, AgentService(url) as agents:
        graded = {body: await pool.grade(RewardJob(url=url, arguments={"body": body})) for body in bodies}
        solved = {body: await agents.solve(agent_task("any", body=body)) for body in bodies}
    for found in (graded, solved):
        wrong = {body: disagreement(found[body], expected) for body, expected in bodies.items()}  # type: ignore[index]
        assert {body: result for body, result in wrong.items() if result is not None} == {}


@pytest.mark.parametrize(
    ("body", "expected"),
    [(json.dumps(SIXTEEN), 16.0), (json.dumps(SEVENTEEN), ("bad_component", TOO_MANY)), ("[1]", JSON_WRONG["[1]"])],
    ids=["16", "17", "list"],
)
async def test_the_json_of_a_program_is_read_as_a_reward(body: str, expected: Any) -> None:
    code = f"import os; open(os.environ['GSPO_RESULT'], 'w').write('{body}')"
    result = await AgentProgram([sys.executable, "-c", code]).solve(agent_task("any"))
    assert disagreement(result, expected) is None, result

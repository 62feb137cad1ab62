"""A sandbox that fails, and jobs that are none: nothing is worth 0 for them."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from gspo.tasks.environments import RewardJob
from gspo_services.tasks.environments import RewardPool
from gspo_services.tasks.environments.programs import TOOLCHAINS
from gspo_services.tasks.sandbox import RunOutcome, SandboxError
from tests.support.sandboxes import ScriptedSandbox, ScriptedSandboxes, outcome

TASK = {"place": "rows.jsonl, line 7", "problem": {"tests": [{"input": "", "output": "7"}]}}


def sevens(*, num_failures: int = 0, num_slow: int = 0) -> ScriptedSandboxes:
    """Every program prints 7. The first sandboxes fail, and the first runs are ended by the clock."""

    def run(_: ScriptedSandbox) -> RunOutcome:
        if sandboxes.num_sandboxes <= num_failures:
            raise SandboxError("the sandbox has ended")
        ended = replace(outcome(0, b"7\n"), wall_s=1.0)
        if len(sandboxes.limits) > num_slow:
            return ended
        return replace(ended, limit="wall", exit_code=None, wall_s=sandboxes.limits[-1].wall_s)

    sandboxes = ScriptedSandboxes(runs=run)
    return sandboxes


def job(**changes: Any) -> RewardJob:
    arguments: dict[str, Any] = {
        "task": TASK, "source": "print(7)", "language": "python", "toolchains": msgspec.to_builtins(dict(TOOLCHAINS)),
        "rules": {},
    }  # fmt: skip
    return RewardJob(grader="programs", arguments={**arguments, **changes}, weights={"solved": 1.0})


async def test_a_sandbox_that_fails_is_replaced_once() -> None:
    sandboxes = sevens(num_failures=1)
    async with RewardPool(sandboxes=sandboxes) as pool:
        result = await pool.grade(job())
    assert (result.reward, result.failure, sandboxes.num_sandboxes) == (1.0, None, 2)


async def test_what_the_clock_has_ended_runs_once_more_with_more_time() -> None:
    """It may have waited for a processor."""
    sandboxes = sevens(num_slow=1)
    async with RewardPool(sandboxes=sandboxes) as pool:
        result = await pool.grade(job(rules={"test_s": 2.0}))
    assert (result.reward, [each.wall_s for each in sandboxes.limits]) == (1.0, [6.0, 24.0])
    async with RewardPool(sandboxes=sevens(num_slow=2)) as pool:
        result = await pool.grade(job(rules={"test_s": 2.0}))
    assert (result.reward, result.components["limit_wall"]) == (0.0, 1.0)


async def test_a_solution_that_the_clock_has_ended_is_tried_again_for_the_next_program() -> None:
    task = {**TASK, "problem": {**TASK["problem"], "solution": "print(7)"}}  # type: ignore[dict-item]
    async with RewardPool(sandboxes=sevens(num_slow=2)) as pool:
        first = await pool.grade(job(task=task, rules={"try_solution": True}))
        second = await pool.grade(job(task=task, rules={"try_solution": True}))
    assert (first.reward, first.failure) == (None, "bad_task")
    assert "its own solution fails (limit_wall" in first.detail
    assert (second.reward, second.failure) == (1.0, None)


async def test_a_problems_own_limits_come_first_and_a_wait_for_a_processor_uses_up_little() -> None:
    """Each run takes 1 s by the clock, and 0.1 s of a processor."""
    sandboxes, test = sevens(), {"input": "", "output": "7"}
    limits = {"time_limit_s": 1.5, "memory_bytes": 64 << 20, "total_s": 1.55}
    async with RewardPool(sandboxes=sandboxes) as pool:
        result = await pool.grade(job(task={**TASK, "problem": {"tests": [test, test], **limits}}))
    assert result.reward == 1.0
    assert [each.cpu_s for each in sandboxes.limits] == pytest.approx([1.5, 1.45])
    assert [each.memory_bytes for each in sandboxes.limits] == [64 << 20] * 2


async def test_an_answer_without_a_program_is_worth_0() -> None:
    async with RewardPool(sandboxes=sevens()) as pool:
        result = await pool.grade(job(source=None))
    assert (result.reward, result.components["no_program"], result.components["solved"]) == (0.0, 1.0, 0.0)


async def test_a_sandbox_that_fails_twice_scores_nobody() -> None:
    sandboxes = sevens(num_failures=2)
    async with RewardPool(sandboxes=sandboxes) as pool:
        result = await pool.grade(job())
    assert (result.reward, result.failure, result.detail) == (None, "sandbox", "the sandbox has ended")
    assert sandboxes.num_sandboxes == 2


@pytest.mark.parametrize(
    ("changes", "reason", "says"),
    [
        ({"task": {}}, "bad_job", 'the task has no "problem"'),
        ({"task": {"problem": {"tests": [{"input": "", "output": 7}]}}}, "bad_job", "Expected `str`, got `int`"),
        ({"rules": {"test_s": 0}}, "bad_job", "test_s"),
        ({"language": "cobol"}, "bad_task", 'rows.jsonl, line 7: its solution is in "cobol", which is not known'),
        (
            {"task": {**TASK, "problem": {"tests": []}}},
            "bad_task",
            "rows.jsonl, line 7: it has no tests: add them, or leave the row out",
        ),
        (
            {"language": "cpp", "task": {**TASK, "problem": {**TASK["problem"], "function": "f"}}},  # type: ignore[dict-item]
            "bad_task",
            "it calls the function f, and functions are called in Python alone, not in cpp",
        ),
    ],
)
async def test_a_job_or_task_that_is_none_scores_nobody(changes: dict[str, Any], reason: str, says: str) -> None:
    async with RewardPool(sandboxes=sevens()) as pool:
        result = await pool.grade(job(**changes))
    assert (result.reward, result.failure) == (None, reason)
    assert says in result.detail


async def test_without_a_sandbox_or_with_another_grader_there_is_no_reward() -> None:
    async with RewardPool() as pool:
        result = await pool.grade(job())
    assert (result.reward, result.failure) == (None, "sandbox")
    async with RewardPool(sandboxes=sevens()) as pool:
        result = await pool.grade(RewardJob(grader="essays", arguments={}))
    assert (result.reward, result.failure, result.detail) == (
        None,
        "bad_job",
        'there is no grader "essays": expected "programs"',
    )

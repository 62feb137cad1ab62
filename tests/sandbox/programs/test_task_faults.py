"""Faults that are not the model's: nothing is scored 0 for them, and each is named with file, row and the way out."""

import random
from pathlib import Path
from typing import Any

import pytest

from gspo.tasks.environments import RewardJob
from gspo_services.shared.runtime.errors import ConfigurationError, UnprovenError
from gspo_services.tasks.environments import RewardPool, create_environment
from gspo_services.tasks.sandbox import LocalOptions, LocalSandboxes
from tests.sandbox.programs.scoring import ADD, ADDITION, Scoring, ending, fenced

pytestmark = pytest.mark.sandbox


async def test_tests_that_the_rows_own_solution_fails_score_nobody(scoring: Scoring, tmp_path: Path) -> None:
    wrong = {**ADDITION, "tests": [*ADDITION["tests"], {"input": "1 1\n", "output": "3\n"}], "solution": ADD}
    for answer in (fenced(ADD), fenced("print(0)"), "no program"):
        result = await scoring.score(tmp_path, wrong, answer)
        assert (result.reward, result.failure) == (None, "bad_task")
        assert "rows.jsonl, line 1: its own solution fails (wrong_answer; test 4 of 4" in result.detail
        assert "try_solutions = false" in result.detail
    result = await scoring.score(tmp_path, wrong, fenced(ADD), try_solutions=False)
    assert (result.reward, ending(result)) == (0.0, "wrong_answer")


async def test_a_solution_that_passes_is_tried_once(scoring: Scoring, tmp_path: Path) -> None:
    """It takes longer than all programs of the policy are allowed together, were it tried for each."""
    row = {**ADDITION, "solution": ADD}
    for _ in range(2):
        result = await scoring.score(tmp_path, row, fenced(ADD))
        assert (result.reward, result.failure) == (1.0, None)


async def test_packed_tests_that_are_damaged_on_the_way_score_nobody(scoring: Scoring, tmp_path: Path) -> None:
    many = {**ADDITION, "tests": ADDITION["tests"] * 400}
    path = tmp_path / "rows.jsonl"
    result = await scoring.score(tmp_path, many, fenced("print(0)"))
    assert (result.reward, ending(result)) == (0.0, "wrong_answer")
    environment = create_environment("code", {"train_path": str(path)})
    task: dict[str, Any] = environment.tasks("train").task(0)
    assert task["problem"]["packed"]
    task["problem"]["packed"] = task["problem"]["packed"][:-40]
    job = environment.step({}, fenced(ADD)).reward
    assert isinstance(job, RewardJob)
    result = await scoring._pool.grade(job.for_task(task))
    assert (result.reward, result.failure) == (None, "bad_task")
    assert "line 1: its tests do not unpack" in result.detail


async def test_a_compiler_that_is_missing_is_no_programs_fault(scoring: Scoring, tmp_path: Path) -> None:
    toolchains = {
        "cobol": {
            "file": "a.cob",
            "compile": ["no-such-cobc", "/sandbox/a.cob"],
            "run": ["/sandbox/a"],
            "probe": "DISPLAY 7.",
        }
    }
    options = {"languages": ["cobol"], "toolchains": toolchains}
    result = await scoring.score(tmp_path, ADDITION, fenced("DISPLAY 3.", "cobol"), **options)
    assert (result.reward, result.failure) == (None, "sandbox")
    assert "no-such-cobc is not there, which compiles cobol" in result.detail
    environment = create_environment("code", {"train_path": str(tmp_path / "rows.jsonl"), **options})
    async with LocalSandboxes(LocalOptions(max_sandboxes=1, warm=0)).opened() as sandboxes:
        with pytest.raises(ConfigurationError, match="no-such-cobc is not there"):
            async with RewardPool(sandboxes=sandboxes, probes=environment.reward_probes):
                pass


async def test_an_interpreter_that_is_missing_is_found_before_a_rollout_starts(tmp_path: Path) -> None:
    toolchains = {"lisp": {"file": "a.lisp", "run": ["no-such-lisp", "/sandbox/a.lisp"], "probe": "(print 7)"}}
    environment = create_environment("code", {"languages": ["lisp"], "toolchains": toolchains})
    async with LocalSandboxes(LocalOptions(max_sandboxes=1, warm=0)).opened() as sandboxes:
        with pytest.raises(UnprovenError, match=r'programs in "lisp" cannot be scored: a trial ended as crashed'):
            async with RewardPool(sandboxes=sandboxes, probes=environment.reward_probes):
                pass


async def test_tests_that_stay_in_their_file_score_programs_while_it_is_there(scoring: Scoring, tmp_path: Path) -> None:
    numbers = [str(random.Random(seed).randbytes(40_000).hex()) for seed in range(4)]
    row = {"prompt": "Say it.", "tests": [{"input": number, "output": number} for number in numbers]}
    result = await scoring.score(tmp_path, row, fenced("print(input())"))
    assert (result.reward, ending(result)) == (1.0, "solved")
    environment = create_environment("code", {"train_path": str(tmp_path / "rows.jsonl")})
    task: dict[str, Any] = environment.tasks("train").task(0)
    assert task["problem"]["in_file"]["row"] == 1
    (tmp_path / "rows.jsonl").unlink()
    job = environment.step({}, fenced("print(input())")).reward
    assert isinstance(job, RewardJob)
    async with (
        LocalSandboxes(LocalOptions(max_sandboxes=1, warm=0)).opened() as sandboxes,
        RewardPool(sandboxes=sandboxes) as pool,
    ):
        result = await pool.grade(job.for_task(task))
    assert (result.reward, result.failure) == (None, "bad_task")
    assert "rows.jsonl, line 1: its tests are too large for a task" in result.detail

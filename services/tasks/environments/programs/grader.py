"""The grader "programs": scores programs in a sandbox, by their tests or by the checker of their problem."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import msgspec
import structlog

from gspo_services.tasks.environments.programs.checkers import Checker
from gspo_services.tasks.environments.programs.problems import Problem, ProgramTest, TaskFault, TestsElsewhere
from gspo_services.tasks.environments.programs.rules import ProgramRules
from gspo_services.tasks.environments.programs.runs import TestRuns
from gspo_services.tasks.environments.programs.sandboxed_program import put_program
from gspo_services.tasks.environments.programs.toolchains import Toolchain
from gspo_services.tasks.environments.programs.verdict import ProgramVerdict
from gspo_services.tasks.sandbox import Sandbox, SandboxError, Sandboxes

log = structlog.get_logger(__name__)

Result = TypeVar("Result")

KEPT_TRIALS: Final = 10_000
"""Problems that were tried, with what came of it."""


class GradedProgram(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The arguments of the grader; ``task`` has a Problem in "problem", and may have file and row in "place"."""

    task: dict[str, Any]
    source: str | None
    """None: the answer has no program, or one in a language that is not allowed."""
    language: str
    toolchains: dict[str, Toolchain]
    rules: ProgramRules

    @property
    def place(self) -> str:
        """Where the task comes from, for errors and logs."""
        return str(self.task.get("place", "the task"))


@dataclass(kw_only=True)
class ProblemTrial:
    """A problem's checker and its own solution: whether they were tried, and why nobody can be scored by them."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    fault: str | None = None
    """None: not tried yet. "": there is none."""


class ProgramGrader:
    """Scores programs, as many at a time as there may be sandboxes."""

    def __init__(self, sandboxes: Sandboxes, read_tests: Callable[[TestsElsewhere], list[ProgramTest]]) -> None:
        """``read_tests`` reads those that did not travel with their task; it raises ValueError where it cannot."""
        self._sandboxes = sandboxes
        self._read_tests = read_tests
        self._trials: OrderedDict[bytes, ProblemTrial] = OrderedDict()

    async def grade(self, arguments: Mapping[str, object]) -> dict[str, float]:
        """The components of the reward (``ProgramVerdict.components``).

        Raises: TaskFault with file and row, where the task is wrong; SandboxError, where nothing can be run; ValueError for
        what are no arguments. None of them is the program's doing.
        """
        asked = msgspec.convert(arguments, GradedProgram)
        if "problem" not in asked.task:
            raise ValueError('the task has no "problem": the grader "programs" is for tasks of code and contest')
        problem = msgspec.convert(asked.task["problem"], Problem)
        try:
            verdict = await self._verdict(asked, problem)
        except TaskFault as error:
            raise TaskFault(f"{asked.place}: {error}") from error
        log.debug("program_scored", place=asked.place, ending=verdict.ending, passed=verdict.num_passed, why=verdict.detail)
        return verdict.components()

    async def _verdict(self, asked: GradedProgram, problem: Problem) -> ProgramVerdict:
        tests = await self._tests_of(problem)
        if not tests:
            raise TaskFault("it has no tests: add them, or leave the row out")
        await self._try_problem(asked, problem, tests)
        if asked.source is None:
            return ProgramVerdict(ending="no_program", num_tests=len(tests))
        return await self._score(asked.source, asked.language, asked, problem, tests)

    async def _tests_of(self, problem: Problem) -> list[ProgramTest]:
        try:
            tests = await self._read(problem.in_file) if problem.in_file is not None else problem.carried_tests()
        except ValueError as error:
            what = "do not unpack" if problem.in_file is None else "are too large for a task and stay in their file"
            raise TaskFault(f"its tests {what}: {error}") from error
        if problem.generated is None:
            return tests
        try:
            return [*tests, *await self._read(problem.generated)]
        except ValueError as error:
            raise TaskFault(f"its generated tests lie in a file of their own: {error}") from error

    async def _read(self, asked: TestsElsewhere) -> list[ProgramTest]:
        # Megabytes of a file, while other episodes go on.
        return await asyncio.to_thread(self._read_tests, asked)

    async def _try_problem(self, asked: GradedProgram, problem: Problem, tests: Sequence[ProgramTest]) -> None:
        """Raises: TaskFault when the checker rejects an expected output, or the problem's own solution fails.

        Both are tried once, and before the first answer, so that a fault does not depend on what the policy says.
        """
        solution = problem.solution if asked.rules.try_solution else ""
        if problem.checker is None and not solution:
            return
        key = hashlib.blake2b(msgspec.json.encode(problem), digest_size=16).digest()
        trial = self._trials.setdefault(key, ProblemTrial())
        while len(self._trials) > KEPT_TRIALS:
            self._trials.popitem(last=False)
        async with trial.lock:
            if trial.fault is None:
                trial.fault = await self._fault_of_checker(asked, problem, tests)
                if not trial.fault and solution:
                    verdict = await self._score(solution, problem.solution_language, asked, problem, tests)
                    if verdict.ending in ("limit_wall", "limit_total"):
                        # The machine may have been too busy. The next program asks again.
                        trial.fault = None
                        raise TaskFault(_fault_of(verdict))
                    trial.fault = "" if verdict.ending == "solved" else _fault_of(verdict)
        if trial.fault:
            raise TaskFault(trial.fault)

    async def _fault_of_checker(self, asked: GradedProgram, problem: Problem, tests: Sequence[ProgramTest]) -> str:
        """What is wrong with the checker of the problem; "" for nothing, and where there is none."""
        if problem.checker is None:
            return ""
        return await self._sandboxed(asked, lambda sandbox: _require_checker(sandbox, asked, problem, tests))

    async def _score(
        self, source: str, language: str, asked: GradedProgram, problem: Problem, tests: Sequence[ProgramTest]
    ) -> ProgramVerdict:
        """Run the tests, then the checker."""
        toolchain = _toolchain(asked, language, "solution")

        async def run(sandbox: Sandbox) -> TestRuns | ProgramVerdict:
            program = await put_program(sandbox, source, language, toolchain, problem)
            if isinstance(program, ProgramVerdict):
                return replace(program, num_tests=len(tests))
            runs = TestRuns(problem, asked.rules, tests)
            await runs.run(program)
            return runs

        runs = await self._sandboxed(asked, run)
        if isinstance(runs, ProgramVerdict):
            return runs
        if problem.checker is not None and any(run.failure is None for run in runs.ran):
            # In a sandbox of its own, which no program of the policy has been in.
            await self._sandboxed(asked, lambda sandbox: _check(sandbox, asked, problem, runs))
        return runs.verdict()

    async def _sandboxed(self, asked: GradedProgram, act: Callable[[Sandbox], Awaitable[Result]]) -> Result:
        """What ``act`` makes of a sandbox. One that fails meanwhile is replaced once. Raises: SandboxError; TaskFault."""
        try:
            async with self._sandboxes.acquire() as sandbox:
                return await act(sandbox)
        except SandboxError as error:
            log.warning("sandbox_failed", place=asked.place, error=str(error))
        async with self._sandboxes.acquire() as sandbox:
            return await act(sandbox)


async def _put_checker(sandbox: Sandbox, asked: GradedProgram, problem: Problem) -> Checker:
    checker = problem.checker
    assert checker is not None
    return await Checker.put(sandbox, checker, _toolchain(asked, checker.language, "checker"), asked.rules.testlib)


async def _require_checker(sandbox: Sandbox, asked: GradedProgram, problem: Problem, tests: Sequence[ProgramTest]) -> str:
    return await (await _put_checker(sandbox, asked, problem)).require_right(tests)


async def _check(sandbox: Sandbox, asked: GradedProgram, problem: Problem, runs: TestRuns) -> None:
    await (await _put_checker(sandbox, asked, problem)).check(runs)


def _toolchain(asked: GradedProgram, language: str, whose: str) -> Toolchain:
    if language not in asked.toolchains:
        raise TaskFault(
            f'its {whose} is in "{language}", which is not known: say how it runs in '
            f"environment.options.toolchains.{language}"
        )
    return asked.toolchains[language]


def _fault_of(verdict: ProgramVerdict) -> str:
    return (
        f"its own solution fails ({verdict.ending}; {verdict.detail}). Correct the tests or the solution, leave the row "
        "out, or set environment.options.try_solutions = false to score by these tests as they are"
    )

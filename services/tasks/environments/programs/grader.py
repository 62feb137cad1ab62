"""The grader "programs": scores programs in a sandbox, by their tests or by the checker of their problem."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec
import structlog

from gspo_services.tasks.environments.programs.checkers import check_outputs
from gspo_services.tasks.environments.programs.problems import FiledTests, Problem, ProgramTest, TaskFault
from gspo_services.tasks.environments.programs.rules import ProgramRules
from gspo_services.tasks.environments.programs.runs import TestRuns
from gspo_services.tasks.environments.programs.sandboxed_program import put_program
from gspo_services.tasks.environments.programs.toolchains import Toolchain
from gspo_services.tasks.environments.programs.verdict import ProgramVerdict
from gspo_services.tasks.sandbox import SandboxError, Sandboxes

log = structlog.get_logger(__name__)

KEPT_TRIALS: Final = 10_000
"""Problems whose own solution was tried, with what came of it."""


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
class SolutionTrial:
    """A problem's own solution: whether it was tried, and why its tests cannot be right."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    fault: str | None = None
    """None: not tried yet. "": it passes."""


class ProgramGrader:
    """Scores programs, as many at a time as there may be sandboxes."""

    def __init__(self, sandboxes: Sandboxes, read_tests: Callable[[FiledTests], list[ProgramTest]]) -> None:
        """``read_tests`` reads those that did not travel with their task; it raises ValueError where it cannot."""
        self._sandboxes = sandboxes
        self._read_tests = read_tests
        self._trials: OrderedDict[bytes, SolutionTrial] = OrderedDict()

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
        if asked.rules.try_solution and problem.solution:
            await self._try_solution(asked, problem, tests)
        if asked.source is None:
            return ProgramVerdict(ending="no_program", num_tests=len(tests))
        return await self._score(asked.source, asked.language, asked, problem, tests)

    async def _tests_of(self, problem: Problem) -> list[ProgramTest]:
        if problem.in_file is not None:
            try:
                # Megabytes of a file, while other episodes go on.
                return await asyncio.to_thread(self._read_tests, problem.in_file)
            except ValueError as error:
                raise TaskFault(f"its tests are too large for a task and stay in their file: {error}") from error
        try:
            return problem.carried_tests()
        except ValueError as error:
            raise TaskFault(f"its tests do not unpack: {error}") from error

    async def _try_solution(self, asked: GradedProgram, problem: Problem, tests: Sequence[ProgramTest]) -> None:
        """Raises: TaskFault when the problem's own solution fails; it is tried once."""
        key = hashlib.blake2b(msgspec.json.encode(problem), digest_size=16).digest()
        trial = self._trials.setdefault(key, SolutionTrial())
        while len(self._trials) > KEPT_TRIALS:
            self._trials.popitem(last=False)
        async with trial.lock:
            if trial.fault is None:
                verdict = await self._score(problem.solution, problem.solution_language, asked, problem, tests)
                if verdict.ending in ("limit_wall", "limit_total"):
                    # The machine may have been too busy. The next program asks again.
                    raise TaskFault(_fault_of(verdict))
                trial.fault = "" if verdict.ending == "solved" else _fault_of(verdict)
        if trial.fault:
            raise TaskFault(trial.fault)

    async def _score(
        self, source: str, language: str, asked: GradedProgram, problem: Problem, tests: Sequence[ProgramTest]
    ) -> ProgramVerdict:
        """Run the tests, then the checker. A sandbox that fails meanwhile is asked a second time."""
        toolchain = _toolchain(asked, language, "solution")
        for is_last in (False, True):
            runs = TestRuns(problem, asked.rules, tests)
            try:
                async with self._sandboxes.acquire() as sandbox:
                    program = await put_program(sandbox, source, language, toolchain, problem.function)
                    if isinstance(program, ProgramVerdict):
                        return replace(program, num_tests=len(tests))
                    await runs.run(program)
                # A sandbox of its own, which no program of the policy has been in.
                if problem.checker is not None:
                    checker = problem.checker
                    async with self._sandboxes.acquire() as sandbox:
                        await check_outputs(
                            sandbox, checker, _toolchain(asked, checker.language, "checker"), asked.rules.testlib, runs
                        )
                return runs.verdict()
            except SandboxError as error:
                if is_last:
                    raise
                log.warning("sandbox_failed", place=asked.place, error=str(error))
        raise AssertionError("the second try returns or raises")


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

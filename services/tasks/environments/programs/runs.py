"""The tests of one problem, run by one program: outputs, failures and the time that is left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import structlog

from gspo_services.tasks.environments.programs.owners import OWNERS
from gspo_services.tasks.environments.programs.problems import Problem, ProgramTest, TaskFault
from gspo_services.tasks.environments.programs.results import read_result
from gspo_services.tasks.environments.programs.rules import ProgramRules
from gspo_services.tasks.environments.programs.sandboxed_program import SandboxedProgram, failure_of, limits_for
from gspo_services.tasks.environments.programs.verdict import Ending, ProgramVerdict
from gspo_services.tasks.sandbox import SandboxLimits
from gspo_services.tasks.worker.failures import described

log = structlog.get_logger(__name__)

LARGE_OUTPUT_BYTES: Final = 64 << 10
"""An output of so many bytes is compared in a thread, so that no other episode waits."""
WALL_S_PER_CPU_S: Final = 3.0
"""Time limits are processor time, so that a busy machine costs no program its reward. What waits ends after three times as
long."""
RESULT_GROWTH: Final = 8
PATIENCE: Final = 4.0
"""A run that the clock has ended waited for nothing, or for a processor: it gets a second run with so many times the time,
and only what waits in that one, too, goes over its limit."""


@dataclass(kw_only=True)
class TestRun:
    """One test and what came of it."""

    __test__ = False  # not a test of pytest's

    number: int
    """From 1 on."""
    test: ProgramTest
    output: bytes = b""
    failure: tuple[Ending, str] | None = None
    """How it failed and what was said; None where it is right, or waits for the checker."""


class TestRuns:
    """A program's runs, in the order of the tests; they end with the first failure, unless all are asked for."""

    __test__ = False

    def __init__(self, problem: Problem, rules: ProgramRules, tests: Sequence[ProgramTest]) -> None:
        self.ran: list[TestRun] = []
        self._problem = problem
        self._rules = rules
        self._tests = tests
        self._owner = OWNERS[problem.owner]
        self._total_s = problem.total_s or rules.total_s
        self._left_s = self._total_s

    async def run(self, program: SandboxedProgram) -> None:
        """Run and compare. Raises: TaskFault; SandboxError."""
        for number, test in enumerate(self._tests, start=1):
            run = TestRun(number=number, test=test)
            self.ran.append(run)
            if self._left_s <= 0:
                run.failure = self._out_of_time()
            else:
                await self._one(program, run)
            if run.failure is not None and self.ends_at_failure:
                return

    @property
    def ends_at_failure(self) -> bool:
        """Whether nothing more is wanted of a program that has failed once."""
        return not self._rules.all_tests

    def verdict(self) -> ProgramVerdict:
        """What all runs come to: the first failure, or solved."""
        failed = [run for run in self.ran if run.failure is not None]
        num_tests = len(self._tests)
        if not failed:
            return ProgramVerdict(ending="solved", num_passed=num_tests, num_tests=num_tests)
        assert failed[0].failure is not None
        ending, said = failed[0].failure
        # Behind the first failure a checker may have judged nothing.
        passed = failed[0].number - 1 if self.ends_at_failure else len(self.ran) - len(failed)
        detail = f"test {failed[0].number} of {num_tests}: {said}"
        return ProgramVerdict(ending=ending, num_passed=passed, num_tests=num_tests, detail=detail)

    async def _one(self, program: SandboxedProgram, run: TestRun) -> None:
        rules = self._rules
        test_s = self._problem.time_limit_s or rules.test_s
        seconds = min(test_s, self._left_s)
        limits = SandboxLimits(
            wall_s=WALL_S_PER_CPU_S * seconds,
            cpu_s=seconds,
            memory_bytes=self._problem.memory_bytes or rules.memory_bytes,
            processes=rules.processes,
            output_bytes=rules.output_bytes,
        )
        expected = run.test.output.encode("utf-8", "replace")
        # A result comes with the kinds that JSON has not.
        num_expected = len(expected) * (RESULT_GROWTH if self._problem.function else 1)
        given, limits = run.test.input.encode("utf-8", "replace"), limits_for(limits, num_expected)
        outcome = await program.run(given, limits)
        if outcome.limit == "wall":
            outcome = await program.run(given, replace(limits, wall_s=PATIENCE * limits.wall_s))
        out_of_time = outcome.limit in ("cpu", "wall") and seconds < test_s
        self._left_s -= max(outcome.cpu_s, outcome.wall_s / (PATIENCE * WALL_S_PER_CPU_S))
        run.output = outcome.stdout
        run.failure = self._out_of_time() if out_of_time else failure_of(outcome)
        if run.failure is None and self._problem.checker is None:
            large = max(len(outcome.stdout), len(expected)) > LARGE_OUTPUT_BYTES
            right = await asyncio.to_thread(self._is_right, run) if large else self._is_right(run)
            if not right:
                run.failure = "wrong_answer", "the output is not the expected one"

    def _is_right(self, run: TestRun) -> bool:
        try:
            return self._is_expected(run)
        except TaskFault:
            raise
        # The expected output compares with itself. So this is the program's doing, and worth nothing.
        except Exception as error:  # noqa: BLE001
            log.warning("output_not_compared", test=run.number, error=described(error))
            return False

    def _is_expected(self, run: TestRun) -> bool:
        said, expected = run.output.decode("utf-8", "replace"), run.test.output
        if not self._problem.function:
            return self._owner.same_output(expected, said, self._rules.tolerance)
        try:
            wanted = json.loads(expected)
        except (ValueError, RecursionError) as error:
            raise TaskFault(f"the output of test {run.number} is the result of a function, and not JSON: {error}") from error
        try:
            result = read_result(said, as_json=self._owner.results_as_json)
        except ValueError:
            return False
        return self._owner.same_result(wanted, result, self._rules.tolerance)

    def _out_of_time(self) -> tuple[Ending, str]:
        return "limit_total", f"all tests together took more than {self._total_s:g} s"

"""Checker programs: they say whether an output is right where several are.

Two kinds. "testlib" is a program with the arguments input, output, answer and testlib's exit codes (MikeMirzayanov/testlib:
testlib.h, OK_EXIT_CODE and those behind it); it may be in any language, and need not use the library. "prints" is what
open-r1/codeforces has in "generated_checker": a Python program with the arguments input, answer, output that prints 1 (or
100) or 0, and reads output and answer without their empty lines (guipenedo/piston: packages/codeforces/1.0.0/run).

A checker is tried on the expected outputs first. One that does not take them scores nobody. After that a crash on an output
of the policy is the policy's: if it failed the attempt, garbage would be dropped from training, and not scored 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from gspo_services.tasks.environments.programs.problems import CheckerProgram, ProgramTest, TaskFault
from gspo_services.tasks.environments.programs.runs import PATIENCE, TestRuns
from gspo_services.tasks.environments.programs.sandboxed_program import SandboxedProgram, last_words, put_program
from gspo_services.tasks.environments.programs.toolchains import Toolchain
from gspo_services.tasks.environments.programs.verdict import ProgramVerdict
from gspo_services.tasks.sandbox import ProgramRefused, RunOutcome, Sandbox, SandboxLimits

CHECKER_LIMITS: Final = SandboxLimits(wall_s=30, cpu_s=10, memory_bytes=1 << 30)
TESTLIB_FILE: Final = "testlib.h"
RIGHT: Final = 0
WRONG: Final = frozenset({1, 2, 4, 5, 8})
"""Wrong answer, presentation error, dirt behind the answer, wrong answer of ejudge, unexpected end of the output."""
PARTIAL: Final = 7
"""Points: a part of the score, which counts as wrong."""
PARTIAL_FROM: Final = 16


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What a checker makes of one output."""

    is_right: bool
    failed: str = ""
    """How the checker itself failed; "" for one that has judged."""
    said: str = ""
    is_slow: bool = False
    """It was ended by the clock, as happens on a busy machine, too."""


class Checker:
    """A checker in a sandbox, compiled."""

    def __init__(self, sandbox: Sandbox, program: SandboxedProgram, kind: str) -> None:
        self._sandbox = sandbox
        self._program = program
        self._kind = kind

    @classmethod
    async def put(cls, sandbox: Sandbox, checker: CheckerProgram, toolchain: Toolchain, testlib: str) -> Checker:
        """Raises: TaskFault for a checker that does not compile; SandboxError."""
        if testlib:
            await sandbox.put({TESTLIB_FILE: testlib.encode()})
        elif TESTLIB_FILE in checker.source:
            raise TaskFault(
                "its checker includes testlib.h: name the file in environment.options.testlib_path (it is at "
                "https://github.com/MikeMirzayanov/testlib)"
            )
        program = await put_program(sandbox, checker.source, checker.language, toolchain)
        if isinstance(program, ProgramVerdict):
            raise TaskFault(f"its checker does not compile: {program.detail}. Correct it, or leave the row out")
        return cls(sandbox, program, checker.kind)

    async def require_right(self, tests: Sequence[ProgramTest]) -> str:
        """Judge the expected outputs; gives what is wrong with the checker, or "".

        Raises: TaskFault where the clock has ended it, which may not happen again; SandboxError.
        """
        for number, test in enumerate(tests, start=1):
            judgement = await self._judged(number, test, test.output.encode("utf-8", "replace"))
            if judgement.is_right:
                continue
            what = judgement.failed or "rejects it"
            fault = (
                f"its checker is at fault: given the expected output of test {number} it {what} ({judgement.said}). Correct "
                "it, or leave the row out"
            )
            if judgement.is_slow:
                raise TaskFault(fault)
            return fault
        return ""

    async def check(self, runs: TestRuns) -> None:
        """Judge every output that has no failure yet; a wrong one gets its failure. Raises: TaskFault; SandboxError."""
        for run in runs.ran:
            if run.failure is not None:
                continue
            judgement = await self._judged(run.number, run.test, run.output)
            if judgement.is_right:
                continue
            if judgement.failed:
                run.failure = "checker_failed", f"the checker {judgement.failed}: {judgement.said}"
            else:
                run.failure = "wrong_answer", f"the checker says: {judgement.said}"
            if runs.ends_at_failure:
                return

    async def _judged(self, number: int, test: ProgramTest, output: bytes) -> Judgement:
        prints = self._kind == "prints"
        answer = test.output.encode("utf-8", "replace")
        if prints:
            output, answer = _without_empty_lines(output), _without_empty_lines(answer)
        try:
            await self._sandbox.put({"input": test.input.encode("utf-8", "replace"), "output": output, "answer": answer})
        except ProgramRefused as error:
            raise TaskFault(f"test {number} cannot be checked: {error}") from error
        names = ("input", "answer", "output") if prints else ("input", "output", "answer")
        arguments = [f"/sandbox/{name}" for name in names]
        outcome = await self._program.run(b"", CHECKER_LIMITS, arguments)
        if outcome.limit == "wall":
            patient = replace(CHECKER_LIMITS, wall_s=PATIENCE * CHECKER_LIMITS.wall_s)
            outcome = await self._program.run(b"", patient, arguments)
        said = last_words(outcome)
        if outcome.limit is not None:
            failed = f"went over the limit {outcome.limit}"
            return Judgement(is_right=False, failed=failed, said=said, is_slow=outcome.limit == "wall")
        if outcome.signal is not None:
            return Judgement(is_right=False, failed=f"was ended by signal {outcome.signal}", said=said)
        return _printed(outcome, said) if prints else _exited(outcome, said)


def _exited(outcome: RunOutcome, said: str) -> Judgement:
    code = outcome.exit_code
    assert code is not None
    if code == RIGHT:
        return Judgement(is_right=True)
    # A script that raises has the status of a wrong answer, and its traceback says otherwise.
    if b"Traceback (most recent call last)" in outcome.stderr:
        return Judgement(is_right=False, failed="crashed", said=said)
    if code in WRONG or code == PARTIAL or code >= PARTIAL_FROM:
        return Judgement(is_right=False, said=said)
    return Judgement(is_right=False, failed=f"ended with status {code}, which is no verdict of testlib's", said=said)


def _printed(outcome: RunOutcome, said: str) -> Judgement:
    if outcome.exit_code != 0:
        return Judgement(is_right=False, failed=f"crashed with status {outcome.exit_code}", said=said)
    verdict = b"".join(outcome.stdout.split()).decode(errors="replace").lower()
    if verdict in ("1", "100", "1.0", "true"):
        return Judgement(is_right=True)
    if verdict in ("0", "0.0", "false"):
        return Judgement(is_right=False, said=verdict)
    failed = f"said {verdict[:50]!r}, and not 1 or 0" if verdict else "said nothing"
    return Judgement(is_right=False, failed=failed, said=said)


def _without_empty_lines(text: bytes) -> bytes:
    return b"".join(line for line in text.splitlines(keepends=True) if line.strip(b"\r\n"))

"""Checker programs: they say whether an output is right where several are.

Two kinds. "testlib" is a program with the arguments input, output, answer and testlib's exit codes (MikeMirzayanov/testlib:
testlib.h, OK_EXIT_CODE and those behind it); it may be in any language, and need not use the library. "prints" is what
open-r1/codeforces has in "generated_checker": a Python program with the arguments input, answer, output that prints 1 or 0
(huggingface/open-r1: src/open_r1/utils/competitive_programming/cf_scoring.py).
"""

from __future__ import annotations

from typing import Final

from gspo_services.tasks.environments.programs.problems import CheckerProgram, TaskFault
from gspo_services.tasks.environments.programs.runs import TestRun, TestRuns
from gspo_services.tasks.environments.programs.sandboxed_program import SandboxedProgram, last_words, put_program
from gspo_services.tasks.environments.programs.toolchains import Toolchain
from gspo_services.tasks.environments.programs.verdict import ProgramVerdict
from gspo_services.tasks.sandbox import ProgramRefused, RunOutcome, Sandbox, SandboxLimits

CHECKER_LIMITS: Final = SandboxLimits(wall_s=30, cpu_s=30, memory_bytes=1 << 30)
TESTLIB_FILE: Final = "testlib.h"
RIGHT: Final = 0
WRONG: Final = frozenset({1, 2, 4, 5, 8})
"""Wrong answer, presentation error, dirt behind the answer, wrong answer of ejudge, unexpected end of the output."""
PARTIAL: Final = 7
"""Points: a part of the score, which counts as wrong."""
PARTIAL_FROM: Final = 16


async def check_outputs(
    sandbox: Sandbox, checker: CheckerProgram, toolchain: Toolchain, testlib: str, runs: TestRuns
) -> None:
    """Let the checker judge every output that has no failure yet; a wrong one gets its failure.

    Raises: TaskFault for a checker that does not compile, crashes, goes over a limit, or says nothing; SandboxError.
    """
    waiting = [run for run in runs.ran if run.failure is None]
    if not waiting:
        return
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
    for run in waiting:
        said = await _judged(sandbox, program, checker, run)
        if said is not None:
            run.failure = "wrong_answer", f"the checker says: {said}"
            if runs.ends_at_failure:
                return


async def _judged(sandbox: Sandbox, program: SandboxedProgram, checker: CheckerProgram, run: TestRun) -> str | None:
    """What the checker says of a wrong output; None for a right one."""
    files = {"input": run.test.input.encode(), "output": run.output, "answer": run.test.output.encode()}
    try:
        await sandbox.put(files)
    except ProgramRefused as error:
        raise TaskFault(f"test {run.number} cannot be checked: {error}") from error
    prints = checker.kind == "prints"
    arguments = (
        ("/sandbox/input", "/sandbox/answer", "/sandbox/output")
        if prints
        else ("/sandbox/input", "/sandbox/output", "/sandbox/answer")
    )
    outcome = await program.run(b"", CHECKER_LIMITS, arguments)
    if outcome.limit is not None or outcome.signal is not None:
        why = f"went over the limit {outcome.limit}" if outcome.limit else f"was ended by signal {outcome.signal}"
        raise _bad_checker(run, why, outcome)
    return _printed(run, outcome) if prints else _exited(run, outcome)


def _exited(run: TestRun, outcome: RunOutcome) -> str | None:
    code = outcome.exit_code
    if code == RIGHT:
        return None
    assert code is not None
    # A script that raises has the status of a wrong answer, and its traceback says otherwise.
    if b"Traceback (most recent call last)" in outcome.stderr:
        raise _bad_checker(run, "crashed", outcome)
    if code in WRONG or code == PARTIAL or code >= PARTIAL_FROM:
        return last_words(outcome)
    raise _bad_checker(run, f"ended with status {code}, which is no verdict of testlib's", outcome)


def _printed(run: TestRun, outcome: RunOutcome) -> str | None:
    if outcome.exit_code != 0:
        raise _bad_checker(run, f"crashed with status {outcome.exit_code}", outcome)
    lines = outcome.stdout.split()
    if not lines:
        raise _bad_checker(run, "said nothing", outcome)
    verdict = lines[-1].decode(errors="replace").lower()
    if verdict in ("1", "1.0", "true"):
        return None
    if verdict in ("0", "0.0", "false"):
        return "0"
    raise _bad_checker(run, f"said {verdict[:50]!r}, and not 1 or 0", outcome)


def _bad_checker(run: TestRun, what: str, outcome: RunOutcome) -> TaskFault:
    return TaskFault(f"its checker {what} on test {run.number} ({last_words(outcome)}). Correct it, or leave the row out")

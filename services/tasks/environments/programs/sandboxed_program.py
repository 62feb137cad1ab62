"""One program in one sandbox: put there, compiled, and run on one input after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from gspo_services.tasks.environments.programs.drivers import DRIVER_FILE, FUNCTION_DRIVER, SOLUTION_MODULE
from gspo_services.tasks.environments.programs.owners import OWNERS
from gspo_services.tasks.environments.programs.problems import Problem, TaskFault
from gspo_services.tasks.environments.programs.toolchains import Toolchain
from gspo_services.tasks.environments.programs.verdict import LIMIT_ENDINGS, Ending, ProgramVerdict
from gspo_services.tasks.sandbox import ProgramRefused, RunOutcome, Sandbox, SandboxError, SandboxLimits

COMPILE_LIMITS: Final = SandboxLimits(
    wall_s=240, cpu_s=60, memory_bytes=2 << 30, file_bytes=128 << 20, scratch_bytes=256 << 20
)
NOT_FOUND: Final = 127
MOST_SAID: Final = 300


class SandboxedProgram:
    """A program in a sandbox, compiled where its language is."""

    def __init__(self, sandbox: Sandbox, command: Sequence[str]) -> None:
        self._sandbox = sandbox
        self._command = list(command)

    async def run(self, stdin: bytes, limits: SandboxLimits, arguments: Sequence[str] = ()) -> RunOutcome:
        """Run it once. Raises: TaskFault for an input that no sandbox takes; SandboxError."""
        try:
            return await self._sandbox.run([*self._command, *arguments], limits, stdin)
        except ProgramRefused as error:
            raise TaskFault(f"a test cannot be run: {error}") from error


async def put_program(
    sandbox: Sandbox, source: str, language: str, toolchain: Toolchain, problem: Problem | None = None
) -> SandboxedProgram | ProgramVerdict:
    """The program, ready to run by the rules of its problem; or the verdict on one that cannot be compiled.

    Raises: TaskFault for a function in another language than Python; SandboxError, also for a compiler that is not there.
    """
    function, owner = ("", "") if problem is None else (problem.function, problem.owner)
    is_python = toolchain.file == SOLUTION_MODULE
    if function and not is_python:
        raise TaskFault(f"it calls the function {function}, and functions are called in Python alone, not in {language}")
    files, command = {toolchain.file: source.encode("utf-8", "replace")}, toolchain.run
    driver = FUNCTION_DRIVER if function else OWNERS[owner].driver if is_python else ""
    if driver:
        files[DRIVER_FILE] = driver.encode()
        command = ["python", DRIVER_FILE, *([function, owner or "own"] if function else [])]
    try:
        await sandbox.put(files)
    except ProgramRefused as error:
        return ProgramVerdict(ending="not_compiled", detail=str(error))
    refused = await _compiled(sandbox, language, toolchain)
    return SandboxedProgram(sandbox, command) if refused is None else refused


async def _compiled(sandbox: Sandbox, language: str, toolchain: Toolchain) -> ProgramVerdict | None:
    """The verdict on a program that no compiler takes. Raises: SandboxError."""
    refused: ProgramVerdict | None = None
    for command in (toolchain.compile, toolchain.compile_again):
        if not command:
            continue
        made = await sandbox.prepare(command, COMPILE_LIMITS)
        if made.exit_code == NOT_FOUND:
            raise SandboxError(
                f"{command[0]} is not there, which compiles {language}: install it where the sandbox runs, or name "
                f"another compiler in environment.options.toolchains.{language}"
            )
        if made.succeeded:
            return None
        if made.limit is not None:
            return ProgramVerdict(ending=LIMIT_ENDINGS[made.limit], detail=f"compiling went over the limit {made.limit}")
        refused = refused or ProgramVerdict(ending="not_compiled", detail=last_words(made))
    return refused


def limits_for(limits: SandboxLimits, num_expected_bytes: int) -> SandboxLimits:
    """``limits`` with room for twice an output that is longer than they allow."""
    return replace(limits, output_bytes=max(limits.output_bytes, 2 * num_expected_bytes + 4096))


def failure_of(outcome: RunOutcome) -> tuple[Ending, str] | None:
    """The ending of a run that did not end well, and what it said; None for a good one."""
    if outcome.limit is not None:
        return LIMIT_ENDINGS[outcome.limit], f"over the limit {outcome.limit}"
    if outcome.signal is not None:
        return "crashed", f"ended by signal {outcome.signal}: {last_words(outcome)}"
    if outcome.exit_code:
        return "crashed", f"exit status {outcome.exit_code}: {last_words(outcome)}"
    return None


def last_words(outcome: RunOutcome) -> str:
    """The end of what a run wrote to standard error, or else to standard output, on one line."""
    said = (outcome.stderr.strip() or outcome.stdout.strip())[-MOST_SAID:]
    return " | ".join(said.decode(errors="replace").splitlines()) or "it said nothing"

"""One program in one sandbox: put there, compiled, and run on one input after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from gspo_services.tasks.environments.programs.function_driver import DRIVER, DRIVER_FILE, SOLUTION_MODULE
from gspo_services.tasks.environments.programs.problems import TaskFault
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
    sandbox: Sandbox, source: str, name: str, toolchain: Toolchain, function: str = ""
) -> SandboxedProgram | ProgramVerdict:
    """The program, ready to run; or the verdict on one that cannot be compiled.

    ``name`` is its language. With ``function`` that function is called, in Python. Raises: SandboxError, also for a compiler
    that is not there.
    """
    if function and toolchain.file != SOLUTION_MODULE:
        raise TaskFault(f"it calls the function {function}, and functions are called in Python alone, not in {name}")
    files = {toolchain.file: source.encode("utf-8", "replace")}
    if function:
        files[DRIVER_FILE] = DRIVER.encode()
    try:
        await sandbox.put(files)
    except ProgramRefused as error:
        return ProgramVerdict(ending="not_compiled", detail=str(error))
    if toolchain.compile:
        made = await sandbox.prepare(toolchain.compile, COMPILE_LIMITS)
        if made.exit_code == NOT_FOUND:
            raise SandboxError(
                f"{toolchain.compile[0]} is not there, which compiles {name}: install it where the sandbox runs, or name "
                f"another compiler in environment.options.toolchains.{name}"
            )
        if made.limit is not None:
            return ProgramVerdict(ending=LIMIT_ENDINGS[made.limit], detail=f"compiling went over the limit {made.limit}")
        if not made.succeeded:
            return ProgramVerdict(ending="not_compiled", detail=last_words(made))
    return SandboxedProgram(sandbox, ["python", DRIVER_FILE, function] if function else toolchain.run)


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

"""Computers for tests: on a plain folder in place of a sandbox, and a journal that a kill interrupts."""

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gspo_services.tasks.agents import AgentResult, RecordedStep
from gspo_services.tasks.computers import ComputerOptions
from gspo_services.tasks.sandbox import RunOutcome, Sandbox, SandboxError, Sandboxes, SandboxLimits
from tests.support.agent_pools import ListJournal, agent_pool, agent_task


class FolderSandbox:
    """Runs programs in ``folder``, without walls: where they name /sandbox, they get that folder."""

    def __init__(self, folder: Path, commands: list[str]) -> None:
        self._folder = folder
        self._commands = commands

    async def put(self, files: Mapping[str, bytes]) -> None:
        for name, content in files.items():
            (self._folder / name).parent.mkdir(exist_ok=True)
            (self._folder / name).write_bytes(self._here(content))

    async def prepare(self, command: list[str], limits: SandboxLimits) -> RunOutcome:
        if command[0] == "python":
            # Without the packages of the tests: that is most of its start.
            command = [sys.executable, "-S", str(self._folder / command[1])]
        else:
            self._commands.append(command[-1])
            command = [self._here(word.encode()).decode() for word in command]
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        try:
            stdout, stderr = await process.communicate()
        except asyncio.CancelledError:
            process.kill()
            await process.wait()
            raise
        assert process.returncode is not None
        return RunOutcome(
            exit_code=process.returncode, signal=None, limit=None, stdout=stdout, stderr=stderr, wall_s=0, cpu_s=0
        )

    async def run(self, command: list[str], limits: SandboxLimits, stdin: bytes = b"") -> RunOutcome:
        raise NotImplementedError

    def _here(self, text: bytes) -> bytes:
        return text.replace(b"/sandbox/", f"{self._folder}/".encode())


class FolderSandboxes:
    """Such sandboxes; ``commands`` is what was run in all of them."""

    def __init__(self, folder: Path, num_failures: int = 0) -> None:
        """``num_failures``: so many of the first cannot be had."""
        self._folder = folder
        self._num_failures = num_failures
        self._number = 0
        self.num_open = 0
        self.commands: list[str] = []

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[Sandbox]:
        self._number += 1
        if self._number <= self._num_failures:
            raise SandboxError("the sandbox has ended")
        folder = self._folder / f"sandbox-{self._number}"
        folder.mkdir()
        self.num_open += 1
        try:
            yield FolderSandbox(folder, self.commands)
        finally:
            self.num_open -= 1
            shutil.rmtree(folder)


def computer_options(sandboxes: Sandboxes, max_bytes: int = 1 << 20, memory_bytes: int = 256 << 20) -> ComputerOptions:
    """What the computers of a test have."""
    return ComputerOptions(sandboxes=sandboxes, max_bytes=max_bytes, memory_bytes=memory_bytes, max_wall_s=60)


class KeepingJournal(ListJournal):
    """Keeps steps as a broker does: one that differs voids those after it."""

    def __init__(self, *recorded: RecordedStep) -> None:
        super().__init__(*recorded)
        self.steps = list(recorded)

    async def record(self, step: RecordedStep, ordinal: int) -> None:
        await super().record(step, ordinal)
        self.steps[ordinal:] = [step]

    @property
    def told(self) -> list[Any]:
        """What came out of each part of the script."""
        told = self.steps[-1].result
        assert isinstance(told, list), self.steps[-1]
        return told


async def played(
    sandboxes: Sandboxes, journal: ListJournal, script: list[Any], function: str = "play", **options: int
) -> AgentResult:
    """The end of an episode that plays ``script`` on its computer."""
    async with player(sandboxes, function, **options) as play:
        return await play(journal, script)


@asynccontextmanager
async def player(
    sandboxes: Sandboxes, function: str = "play", **options: int
) -> AsyncIterator[Callable[[ListJournal, list[Any]], Awaitable[AgentResult]]]:
    """``played`` for several episodes, one after another, of the same worker."""
    function = f"tests.support.computer_agents:{function}"
    async with agent_pool(function, computers=computer_options(sandboxes, **options)) as pool:
        yield lambda journal, script: pool.solve(agent_task("play", script=script), journal)

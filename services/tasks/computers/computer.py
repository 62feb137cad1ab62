"""One episode's computer: its files are here, and each command gets a sandbox that ends with it.

So nothing is held between commands, and an episode that goes on after a kill begins its next command as any other does.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple

import structlog

from gspo.tasks.computer import ComputerError
from gspo.tasks.environments import Plain
from gspo_services.tasks.computers.files import BadChange, ComputerFiles
from gspo_services.tasks.computers.records import (
    MAX_CHANGE_BYTES,
    MAX_CHANGES_BYTES,
    Answer,
    change_in,
    compressed,
    recorded,
    shortened,
)
from gspo_services.tasks.sandbox import ProgramRefused, RunOutcome, Sandbox, SandboxError, Sandboxes, SandboxLimits

log = structlog.get_logger(__name__)

UNPACK, PACK = ((Path(__file__).with_name("inside") / name).read_bytes() for name in ("unpack.py", "pack.py"))
COMMAND: Final = 'PATH=/sandbox/bin:$PATH; export PATH; cd /sandbox/work && exec /bin/sh -c "$0" 2>&1'
OUTPUT_BYTES: Final = 1 << 20
HEADER_BYTES: Final = 8 << 20
"""At most of paths, modes and times, beside the contents."""
TOOL_WALL_S: Final = 30.0
TRIES: Final = 2


@dataclass(frozen=True, kw_only=True)
class ComputerOptions:
    """What every computer of a rollout has."""

    sandboxes: Sandboxes
    max_bytes: int
    """Of all files of one computer."""
    memory_bytes: int
    """Of a command."""
    max_wall_s: float
    """The most that an agent may ask for a command."""
    wall_ns: Callable[[], int] = time.time_ns
    """Nanoseconds since 1970, for the times of written files."""


class ComputerRequest(NamedTuple):
    """What an agent asks. ``ordinal``: of this step, and for "read" of the next one."""

    do: Literal["run", "write", "read"]
    ordinal: int
    command: str = ""
    timeout_s: float = 0.0
    files: Mapping[str, bytes] = {}
    path: str = ""


class ComputerAnswer(NamedTuple):
    """``answer`` is for the agent, ``record`` for the journal."""

    answer: Answer
    record: Plain


class EpisodeComputer:
    """See the module. Asked for one thing at a time.

    waits for:    a free sandbox, then a command
    unblocked by: the end of other commands, each of which has its limits; the end of the episode, which cancels
    """

    def __init__(self, options: ComputerOptions, steps: Sequence[tuple[str, Plain]]) -> None:
        """``steps``: names and results of the recorded steps."""
        self._options = options
        self._steps = steps
        self._done = 0
        """The steps whose changes the files have."""
        self._files = ComputerFiles()
        self._num_recorded_bytes = 0
        self._is_lost = False

    async def do(self, asked: ComputerRequest) -> ComputerAnswer:
        """Do it. Raises: SandboxError where no command can be run; BadChange for a record that no computer has written."""
        self._catch_up(asked.ordinal)
        try:
            if asked.do == "read":
                content = base64.b64encode(self._files.read(asked.path)).decode()
                return ComputerAnswer({"content": content}, None)
            if asked.do == "write":
                self._write(asked.files)
                answer: Answer = {}
                return ComputerAnswer(answer, {"answer": answer})
            answer, change = await self._run(asked.command, asked.timeout_s)
            return ComputerAnswer(answer, recorded(answer, change))
        except ComputerError as error:
            refused: Answer = {"error": str(error)}
            of_run = asked.do == "run"
            return ComputerAnswer(refused, recorded(refused, NO_CHANGE) if of_run else {"answer": refused})
        finally:
            self._done = asked.ordinal + (asked.do != "read")

    def diverged(self, ordinal: int) -> None:
        """The recorded steps from ``ordinal`` on are void."""
        self._steps = self._steps[:ordinal]

    def _catch_up(self, ordinal: int) -> None:
        """Make the files as they were before the step ``ordinal``; what was written the agent writes again."""
        for name, result in self._steps[self._done : ordinal]:
            found = change_in(name, result, self._options.max_bytes + HEADER_BYTES)
            if found is not None:
                change, num_bytes = found
                self._num_recorded_bytes += num_bytes
                self._files = self._files.changed(change)

    def _write(self, files: Mapping[str, bytes]) -> None:
        after = self._files.written(files, self._options.wall_ns())
        if after.num_bytes > self._options.max_bytes:
            raise ComputerError(
                f"with these there are {after.num_bytes} bytes of files: agent.computer_bytes is {self._options.max_bytes}"
            )
        self._files = after

    async def _run(self, command: str, timeout_s: float) -> tuple[Answer, bytes | None]:
        """Its answer, and its change as it is recorded. Raises: ComputerError; SandboxError."""
        if timeout_s > self._options.max_wall_s:
            raise ComputerError(f"timeout_s is {timeout_s:g}: sandbox.max_wall_s allows {self._options.max_wall_s:g}")
        limits = SandboxLimits(
            wall_s=timeout_s, cpu_s=timeout_s, memory_bytes=self._options.memory_bytes, output_bytes=OUTPUT_BYTES
        )
        outcome, change = await self._in_a_sandbox(command, limits)
        limit, output = outcome.limit, shortened(outcome.stdout + outcome.stderr)
        if isinstance(change, str):
            limit = limit or "file"
            output += f"\n[the changes of this command to the files are undone: {change}]"
        small = NO_CHANGE if isinstance(change, str) else await asyncio.to_thread(compressed, change)
        exit_code = None if limit else outcome.exit_code if outcome.signal is None else 128 + outcome.signal
        return {"exit_code": exit_code, "output": output, "limit": limit}, self._kept(small)

    def _kept(self, change: bytes) -> bytes | None:
        """The change where the journal has room for it, and all before it."""
        total = self._num_recorded_bytes + len(change)
        if not self._is_lost and (len(change) > MAX_CHANGE_BYTES or total > MAX_CHANGES_BYTES):
            self._is_lost = True
            log.warning(
                "computer_not_recorded", change_bytes=len(change), max_change_bytes=MAX_CHANGE_BYTES, episode_bytes=total,
                max_episode_bytes=MAX_CHANGES_BYTES,
                meaning="the changes of a command are too large for the journal: after a kill the episode begins again",
            )  # fmt: skip
        if self._is_lost:
            return None
        self._num_recorded_bytes = total
        return change

    async def _in_a_sandbox(self, command: str, limits: SandboxLimits) -> tuple[RunOutcome, bytes | str]:
        """How it ended, and the change of the files, or why it is undone. Raises: SandboxError.

        A sandbox that fails is replaced once: the files here are as they were, so the command is run anew.
        """
        for number in range(TRIES):
            try:
                async with self._options.sandboxes.acquire() as sandbox:
                    return await self._try(sandbox, command, limits, is_last=number == TRIES - 1)
            except ProgramRefused as error:
                raise SandboxError(f"the sandbox refuses the command: {error}") from error
            except SandboxError as error:
                if number == TRIES - 1:
                    raise
                log.warning("computer_sandbox_replaced", error=str(error))
        raise AssertionError("a try returns or raises")

    async def _try(
        self, sandbox: Sandbox, command: str, limits: SandboxLimits, *, is_last: bool
    ) -> tuple[RunOutcome, bytes | str]:
        most = self._options.max_bytes
        tool = SandboxLimits(
            wall_s=min(TOOL_WALL_S, self._options.max_wall_s), cpu_s=min(TOOL_WALL_S, self._options.max_wall_s),
            output_bytes=most + HEADER_BYTES,
        )  # fmt: skip
        await sandbox.put({"tool/unpack.py": UNPACK, "tool/files": self._files.whole()})
        unpacked = await sandbox.prepare(["python", "tool/unpack.py"], tool)
        if not unpacked.succeeded:
            raise SandboxError(f"the files cannot be put into the sandbox: {_said(unpacked)}")
        outcome = await sandbox.prepare(["/bin/sh", "-c", COMMAND, command], limits)
        try:
            # Again the program: the command may have replaced it.
            await sandbox.put({"tool/pack.py": PACK, "tool/before": self._files.asked(most)})
            packed = await sandbox.prepare(["python", "tool/pack.py"], tool)
            if not packed.succeeded:
                return outcome, _said(packed)
            self._files, change = await asyncio.to_thread(self._files.changed, packed.stdout), packed.stdout
        except (SandboxError, BadChange) as error:
            if isinstance(error, SandboxError) and not is_last:
                raise
            # Twice: the command makes it so.
            return outcome, f"they cannot be read: {error}"
        return outcome, change


NO_CHANGE: Final = compressed(b'{"removed":[],"entries":[]}\n')


def _said(outcome: RunOutcome) -> str:
    how = f"limit {outcome.limit}" if outcome.limit else f"exit code {outcome.exit_code}"
    return outcome.stderr.decode(errors="replace").strip()[-300:] or how

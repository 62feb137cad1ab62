"""Programs in sandboxes of bubblewrap on this machine."""

import asyncio
import os
import shutil
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from gspo_services.shared.runtime.errors import PassingFault
from gspo_services.tasks.sandbox.cgroups import MemoryCgroups, memory_cgroups
from gspo_services.tasks.sandbox.frames import frame, read_frame
from gspo_services.tasks.sandbox.interface import (
    RunOutcome,
    SandboxError,
    SandboxLimits,
    SandboxNotStarted,
    SandboxUnavailable,
    check_command,
    check_files,
)
from gspo_services.tasks.sandbox.walls import FIRST_USER, bubblewrap_command, folders_of

log = structlog.get_logger()

START_S: Final = 30.0
GRACE_S: Final = 10.0
"""Init ends a run at its limit; if it has said nothing for so long after that, it is ended itself."""
LAST_MOMENT_S: Final = 1.0
"""Its pipe ends a moment before it does."""
STDERR_BYTES: Final = 4096
PYTHON: Final = Path(sys.executable).resolve()


@dataclass(frozen=True, kw_only=True)
class LocalOptions:
    """What programs find in the sandboxes of this machine."""

    max_sandboxes: int = 2
    """Sandboxes at the same time."""
    warm: int = 2
    """Sandboxes that are started before anybody asks."""
    python: Path = PYTHON
    """Without the packages of this process's virtual environment."""
    read_only: Sequence[Path] = ()
    """Folders beside the system's that programs may read, such as another compiler's."""


class LocalSandbox:
    """One init, from its start to its end. See ``Sandbox``."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def put(self, files: Mapping[str, bytes]) -> None:
        """See ``Sandbox.put``."""
        check_files(files)
        await self._ask({"do": "put", "names": list(files)}, list(files.values()), START_S)

    async def prepare(self, command: list[str], limits: SandboxLimits) -> RunOutcome:
        """See ``Sandbox.prepare``."""
        return await self._run(command, limits, b"", prepares=True)

    async def run(self, command: list[str], limits: SandboxLimits, stdin: bytes = b"") -> RunOutcome:
        """See ``Sandbox.run``."""
        return await self._run(command, limits, stdin, prepares=False)

    async def _run(self, command: list[str], limits: SandboxLimits, stdin: bytes, *, prepares: bool) -> RunOutcome:
        check_command(command, stdin)
        python = command[0] == "python" and len(command) > 1 and not command[1].startswith("-")
        argv = [_in_sandbox(command[1]), *command[2:]] if python else [_in_sandbox(command[0], plain=True), *command[1:]]
        request = {"do": "run", "argv": argv, "python": python, "prepares": prepares, "limits": asdict(limits)}
        header, outputs = await self._ask(request, [stdin], limits.wall_s + GRACE_S)
        if len(outputs) != 2:
            raise SandboxError("the sandbox's answer has no outputs")
        try:
            return msgspec.convert({**header, "stdout": outputs[0], "stderr": outputs[1]}, RunOutcome)
        except msgspec.ValidationError as error:
            raise SandboxError(f"the sandbox's answer is not one: {error}") from error

    async def _ask(
        self, header: Mapping[str, Any], blobs: list[bytes], answer_s: float
    ) -> tuple[dict[str, Any], list[bytes]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(answer_s):
                self._process.stdin.write(frame(header, blobs))
                await self._process.stdin.drain()
                answer, parts = await read_frame(self._process.stdout)
        except TimeoutError as error:
            raise SandboxError(f"the sandbox has said nothing for {answer_s:g} s") from error
        except OSError as error:
            raise SandboxError(f"the sandbox has ended: {error}") from error
        if "failed" in answer:
            raise SandboxError(f"the sandbox failed: {str(answer['failed'])[:300]}")
        return answer, parts

    async def ready(self) -> None:
        """Wait until init can be asked. Raises: SandboxUnavailable."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(START_S):
                await read_frame(self._process.stdout)
        except (TimeoutError, SandboxError) as error:
            killed = await self._is_killed()
            said = await self._last_words()
            if killed:
                text = "a sandbox was killed while it started (SIGKILL): the kernel may lack memory"
                raise SandboxNotStarted(text) from PassingFault(said or str(error))
            raise SandboxNotStarted(f"{said or error}\n{WAY_OUT}") from error

    async def _is_killed(self) -> bool:
        """Whether somebody else's SIGKILL has ended it. Bubblewrap says so of init as a shell does."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_MOMENT_S):
                await self._process.wait()
        return self._process.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)

    async def _last_words(self) -> str:
        assert self._process.stderr is not None
        await self.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_MOMENT_S):
                return (await self._process.stderr.read(STDERR_BYTES)).decode(errors="replace").strip()
        return ""

    async def close(self) -> None:
        """End init, and with it everything in the sandbox."""
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


def _in_sandbox(word: str, *, plain: bool = False) -> str:
    """A file of the sandbox by its whole name; with ``plain``, names without a slash are looked up in PATH."""
    if word.startswith("/") or (plain and "/" not in word):
        return word
    return "/sandbox/" + word.removeprefix("./")


WAY_OUT: Final = (
    "Code of a model runs only in a sandbox. Install bubblewrap (Debian: apt-get install bubblewrap) and allow user "
    "namespaces (sysctl kernel.unprivileged_userns_clone=1, on Ubuntu also kernel.apparmor_restrict_unprivileged_userns=0), "
    "or run "
    "`gspo sandbox` where both are there and set sandbox.urls"
)


class LocalSandboxes:
    """Sandboxes on this machine, some of them started ahead.

    produces:     sandboxes
    waits for:    a free sandbox
    unblocked by: the end of another sandbox
    """

    def __init__(self, options: LocalOptions) -> None:
        self._options = options
        self._free = asyncio.Semaphore(options.max_sandboxes)
        self._users = list(range(FIRST_USER, FIRST_USER + options.max_sandboxes + options.warm))
        self._warm: list[tuple[LocalSandbox, int]] = []
        self._num_starting = 0
        self._tasks: asyncio.TaskGroup | None = None
        self._commands: dict[int, list[str]] = {}
        """What starts the init of each user."""
        self._cgroups = MemoryCgroups(None, "", "not open")

    @property
    def memory(self) -> str:
        """What counts the memory of programs, in words."""
        return self._cgroups.described

    @asynccontextmanager
    async def opened(self) -> AsyncIterator["LocalSandboxes"]:
        """Serve until the end of the block, after which nothing of it runs. Raises: SandboxUnavailable."""
        if shutil.which("bwrap") is None:
            raise SandboxUnavailable(f"bwrap is not found in PATH\n{WAY_OUT}")
        python, is_root = self._options.python, os.geteuid() == 0
        folders = [*folders_of(python), *self._options.read_only]
        self._commands = {user: bubblewrap_command(python, folders, user if is_root else None) for user in self._users}
        with memory_cgroups() as self._cgroups:
            self._warm.append(await self._start("try"))
            log.info("sandboxes_opened", memory=self.memory)
            try:
                async with self._refilling():
                    yield self
            finally:
                for sandbox, _ in self._warm:
                    await sandbox.close()
                self._warm.clear()

    @asynccontextmanager
    async def _refilling(self) -> AsyncIterator[None]:
        failure: BaseException | None = None
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self._refill()
            try:
                yield
            except BaseException as error:  # noqa: BLE001
                # Kept from the group, which would break off the starts that are under way and lose their processes.
                failure = error
            self._tasks = None
        if failure is not None:
            raise failure

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[LocalSandbox]:
        """See ``Sandboxes.acquire``."""
        async with self._free:
            sandbox, user = self._warm.pop() if self._warm else await self._start()
            self._refill()
            try:
                yield sandbox
            finally:
                await sandbox.close()
                self._users.append(user)

    def _refill(self) -> None:
        """Start what is missing of the sandboxes that wait."""
        while self._tasks is not None and len(self._warm) + self._num_starting < self._options.warm and self._users:
            self._num_starting += 1
            self._tasks.create_task(self._start_warm(), name="warm-sandbox")

    async def _start_warm(self) -> None:
        try:
            self._warm.append(await self._start())
        except SandboxError as error:
            log.warning("spare_sandbox_failed", error=str(error))
        finally:
            self._num_starting -= 1

    async def _start(self, word: str = "start") -> tuple[LocalSandbox, int]:
        user = self._users.pop(0)
        sandbox = None
        try:
            files = self._cgroups.files(user)
            command = [*self._commands[user], word, *map(str, files)]
            sandbox = LocalSandbox(
                await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=PIPE, pass_fds=files)
            )
            await sandbox.ready()
        except BaseException as error:
            self._users.append(user)
            if sandbox is not None:
                await sandbox.close()
            if isinstance(error, OSError):
                raise SandboxUnavailable(f"no sandbox can be started: {error}") from error
            raise
        return sandbox, user

"""Programs in sandboxes of bubblewrap on this machine."""

import asyncio
import os
import shutil
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from gspo_services.tasks.sandbox.frames import frame, read_frame
from gspo_services.tasks.sandbox.interface import (
    RunOutcome,
    SandboxError,
    SandboxLimits,
    SandboxUnavailable,
    check_command,
    check_files,
)
from gspo_services.tasks.sandbox.walls import FIRST_USER, bubblewrap_command, folders_of

log = structlog.get_logger()

START_S: Final = 20.0
GRACE_S: Final = 10.0
"""A keeper ends a run at its limit; one that has said nothing for so long after it is ended itself."""
STDERR_BYTES: Final = 4096
PYTHON: Final = Path(sys.executable).resolve()


@dataclass(frozen=True, kw_only=True)
class LocalOptions:
    """What programs find in the sandboxes of this machine."""

    places: int = 2
    """Boxes at the same time."""
    spare: int = 2
    """Boxes that are started before anybody asks."""
    python: Path = PYTHON
    """Without the packages of this process's virtual environment."""
    read_only: Sequence[Path] = ()
    """Folders beside the system's that programs may read, such as another compiler's."""


class LocalBox:
    """One keeper, from its start to its end. See ``Box``."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def put(self, files: Mapping[str, bytes]) -> None:
        """See ``Box.put``."""
        check_files(files)
        await self._ask({"do": "put", "names": list(files)}, list(files.values()), START_S)

    async def prepare(self, command: list[str], limits: SandboxLimits) -> RunOutcome:
        """See ``Box.prepare``."""
        return await self._run(command, limits, b"", prepares=True)

    async def run(self, command: list[str], limits: SandboxLimits, stdin: bytes = b"") -> RunOutcome:
        """See ``Box.run``."""
        return await self._run(command, limits, stdin, prepares=False)

    async def _run(self, command: list[str], limits: SandboxLimits, stdin: bytes, *, prepares: bool) -> RunOutcome:
        check_command(command, stdin)
        python = command[0] == "python" and len(command) > 1 and not command[1].startswith("-")
        argv = [_in_box(command[1]), *command[2:]] if python else [_in_box(command[0], plain=True), *command[1:]]
        request = {"do": "run", "argv": argv, "python": python, "prepares": prepares, "limits": asdict(limits)}
        header, outputs = await self._ask(request, [stdin], limits.wall_s + GRACE_S)
        if len(outputs) != 2:
            raise SandboxError("the sandbox's answer has no outputs")
        try:
            return msgspec.convert({**header, "stdout": outputs[0], "stderr": outputs[1]}, RunOutcome)
        except msgspec.ValidationError as error:
            raise SandboxError(f"the sandbox's answer is not one: {error}") from error

    async def _ask(
        self, header: Mapping[str, Any], blobs: list[bytes], patience_s: float
    ) -> tuple[dict[str, Any], list[bytes]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(patience_s):
                self._process.stdin.write(frame(header, blobs))
                await self._process.stdin.drain()
                answer, parts = await read_frame(self._process.stdout)
        except TimeoutError as error:
            raise SandboxError(f"the sandbox has said nothing for {patience_s:g} s") from error
        except OSError as error:
            raise SandboxError(f"the sandbox has ended: {error}") from error
        if "failed" in answer:
            raise SandboxError(f"the sandbox failed: {str(answer['failed'])[:300]}")
        return answer, parts

    async def ready(self) -> None:
        """Wait until the keeper can be asked. Raises: SandboxUnavailable."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(START_S):
                await read_frame(self._process.stdout)
        except (TimeoutError, SandboxError) as error:
            said = await self._last_words()
            raise SandboxUnavailable(f"{said or error}\n{WAY_OUT}") from error

    async def _last_words(self) -> str:
        assert self._process.stderr is not None
        await self.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(1):
                return (await self._process.stderr.read(STDERR_BYTES)).decode(errors="replace").strip()
        return ""

    async def close(self) -> None:
        """End the keeper, and with it everything in the box."""
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


def _in_box(word: str, *, plain: bool = False) -> str:
    """A file of the box by its whole name; with ``plain``, names without a slash are looked up in PATH."""
    if word.startswith("/") or (plain and "/" not in word):
        return word
    return "/box/" + word.removeprefix("./")


WAY_OUT: Final = (
    "Code of a model runs only in a sandbox. Install bubblewrap (Debian: apt-get install bubblewrap) and allow user "
    "namespaces (sysctl kernel.unprivileged_userns_clone=1, on Ubuntu also kernel.apparmor_restrict_unprivileged_userns=0), "
    "or run "
    "`gspo sandbox` where both are there and set sandbox.urls"
)


class LocalSandbox:
    """Boxes on this machine, some of them started ahead.

    produces:     boxes
    waits for:    a place
    unblocked by: the end of another box
    """

    def __init__(self, options: LocalOptions) -> None:
        self._options = options
        self._free = asyncio.Semaphore(options.places)
        self._users = list(range(FIRST_USER, FIRST_USER + options.places + options.spare))
        self._spare: list[tuple[LocalBox, int]] = []
        self._num_starting = 0
        self._tasks: asyncio.TaskGroup | None = None
        self._commands: dict[int, list[str]] = {}
        """What starts a keeper of each user."""

    @asynccontextmanager
    async def opened(self) -> AsyncIterator["LocalSandbox"]:
        """Serve until the end of the block, after which nothing of it runs. Raises: SandboxUnavailable."""
        if shutil.which("bwrap") is None:
            raise SandboxUnavailable(f"bwrap is not found in PATH\n{WAY_OUT}")
        python, is_root = self._options.python, os.geteuid() == 0
        folders = [*folders_of(python), *self._options.read_only]
        self._commands = {user: bubblewrap_command(python, folders, user if is_root else None) for user in self._users}
        failure: BaseException | None = None
        self._spare.append(await self._start())
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                self._refill()
                try:
                    yield self
                except BaseException as error:  # noqa: BLE001
                    # Kept from the group, which would break off the starts that are under way and lose their processes.
                    failure = error
                self._tasks = None
        finally:
            for box, _ in self._spare:
                await box.close()
            self._spare.clear()
        if failure is not None:
            raise failure

    @asynccontextmanager
    async def box(self) -> AsyncIterator[LocalBox]:
        """See ``Sandbox.box``."""
        async with self._free:
            box, user = self._spare.pop() if self._spare else await self._start()
            self._refill()
            try:
                yield box
            finally:
                await box.close()
                self._users.append(user)

    def _refill(self) -> None:
        """Start what is missing of the boxes that wait."""
        while self._tasks is not None and len(self._spare) + self._num_starting < self._options.spare and self._users:
            self._num_starting += 1
            self._tasks.create_task(self._start_spare(), name="spare-box")

    async def _start_spare(self) -> None:
        try:
            self._spare.append(await self._start())
        except SandboxError as error:
            log.warning("spare_box_failed", error=str(error))
        finally:
            self._num_starting -= 1

    async def _start(self) -> tuple[LocalBox, int]:
        user = self._users.pop(0)
        box = None
        try:
            box = LocalBox(await asyncio.create_subprocess_exec(*self._commands[user], stdin=PIPE, stdout=PIPE, stderr=PIPE))
            await box.ready()
        except BaseException:
            self._users.append(user)
            if box is not None:
                await box.close()
            raise
        return box, user

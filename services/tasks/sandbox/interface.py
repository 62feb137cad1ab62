"""What a sandbox is asked and what it answers, wherever it is."""

import math
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Final, Literal, Protocol

LimitName = Literal["wall", "cpu", "memory", "output", "file"]
MAX_FILES: Final = 256
MAX_FILES_BYTES: Final = 64 << 20
MAX_INPUT_BYTES: Final = 64 << 20


class SandboxError(RuntimeError):
    """The sandbox could not run a program. It is never the program's fault, so nothing may be scored for it."""


class SandboxUnavailable(SandboxError):
    """This machine cannot separate programs; the text says what is missing and the way out."""


class SandboxNotStarted(SandboxUnavailable):
    """A sandbox has ended while it started, and the next one may not."""


class ProgramRefused(ValueError):
    """A program, file or limit that no sandbox takes."""


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """What one run may use. Memory and processor time count all of its processes together."""

    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_bytes: int = 512 << 20
    """Resident memory, where what processes share counts for each, and buffers of sockets. One process may reserve twice as
    much address space. A cgroup, where there is one, gives the run no more than this and ``scratch_bytes``."""
    processes: int = 32
    """Threads included; more cannot be started."""
    output_bytes: int = 1 << 20
    """Of standard output, and of standard error."""
    file_bytes: int = 64 << 20
    """Of each file that it writes."""
    scratch_bytes: int = 64 << 20
    """Of all files in ``/tmp``; memory holds them."""
    open_files: int = 256

    def __post_init__(self) -> None:
        """Raises: ProgramRefused."""
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value > 0):
                raise ProgramRefused(f"the limit {name} is {value}: it must be a number above 0")
        if self.open_files < 16:
            raise ProgramRefused(f"the limit open_files is {self.open_files}: a program needs at least 16")


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """How a run ended: with an exit code, by a signal, or over a limit. Exactly one of the three is there."""

    exit_code: int | None
    signal: int | None
    limit: LimitName | None
    stdout: bytes
    stderr: bytes
    """Both are cut at ``output_bytes``."""
    wall_s: float
    cpu_s: float

    @property
    def succeeded(self) -> bool:
        return self.exit_code == 0


class Sandbox(Protocol):
    """A folder of files, ``/sandbox``, and programs that run beside it, one at a time."""

    async def put(self, files: Mapping[str, bytes]) -> None:
        """Write files, named from ``/sandbox`` on. Raises: ProgramRefused; SandboxError."""

    async def prepare(self, command: list[str], limits: SandboxLimits) -> RunOutcome:
        """Run a program that may write to ``/sandbox``, such as a compiler. Raises: ProgramRefused; SandboxError."""

    async def run(self, command: list[str], limits: SandboxLimits, stdin: bytes = b"") -> RunOutcome:
        """Run a program that cannot change ``/sandbox``. It starts in an empty ``/tmp``, which ends with it.

        A command of "python" and a file runs in an interpreter that is already there, which takes a few milliseconds.
        Raises: ProgramRefused; SandboxError.
        """


class Sandboxes(Protocol):
    """Where programs run that nobody has read."""

    def acquire(self) -> AbstractAsyncContextManager[Sandbox]:
        """A new sandbox, which ends with everything in it. Waits for a free one. Raises: SandboxError."""


def check_files(files: Mapping[str, bytes]) -> None:
    """Raises: ProgramRefused for a name outside of the sandbox, and for too much."""
    if len(files) > MAX_FILES:
        raise ProgramRefused(f"{len(files)} files: a sandbox takes {MAX_FILES} at once")
    for name in files:
        parts = name.split("/")
        if (
            not name
            or "\0" in name
            or any(part in ("", ".", "..") for part in parts)
            or len(name.encode(errors="replace")) > 255
        ):
            raise ProgramRefused(
                f"the file name {name[:100]!r} must be a relative path without . and .., of 255 bytes at most"
            )
    size = sum(map(len, files.values()))
    if size > MAX_FILES_BYTES:
        raise ProgramRefused(f"{size} bytes of files: a sandbox takes {MAX_FILES_BYTES} at once")


def check_command(command: list[str], stdin: bytes) -> None:
    """Raises: ProgramRefused."""
    if not command or not all(isinstance(word, str) and word and "\0" not in word for word in command):
        raise ProgramRefused(f"the command {command!r:.200} must be a list of texts without zero bytes")
    if len(stdin) > MAX_INPUT_BYTES:
        raise ProgramRefused(f"{len(stdin)} bytes of input: a run takes {MAX_INPUT_BYTES}")

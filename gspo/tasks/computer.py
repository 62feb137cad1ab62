"""The computer of an episode: a working directory, and commands in a sandbox without a network. Standard library only."""

import base64
import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from gspo.tasks.step_order import StepOrder, arguments_digest

RUN, WRITE = "computer.run", "computer.write"
"""The names of its steps."""
MAX_COMMAND_BYTES = 64 * 1024
MAX_WRITE_BYTES = 2 * 1024 * 1024
"""Of the files of one ``write``."""
MAX_WRITE_FILES = 1024
MAX_PATH_BYTES = 512


class ComputerError(Exception):
    """The computer refuses what it was asked, such as a path outside of its working directory; the text says why."""


class CommandResult(NamedTuple):
    """How a command ended."""

    exit_code: "int | None"
    """As a shell gives it: 128 and its number for a signal. None: a limit has ended the command."""
    output: str
    """Standard output and standard error, as they came. A long one has its head and its tail."""
    limit: "str | None"
    """"wall", "cpu", "memory", "output" or "file": what has ended the command. For "file" its changes may be undone, and the
    output says so."""


class ComputerPort(Protocol):
    """Where the computer is: at the parent of this process."""

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer; what was done is durable by then."""
        ...

    def ask_now(self, request: dict[str, Any]) -> dict[str, Any]:
        """The same for an agent in a thread."""
        ...


class Computer:
    """Files that last as long as the episode, also over a kill, and commands beside them.

    A command runs in the working directory under ``/bin/sh``, without a network and within limits, and ends with all that it
    has started. Only the files of the working directory last.
    Commands and writes are steps of the episode: a replay gets the recorded results and executes nothing.
    """

    def __init__(self, steps: StepOrder, port: ComputerPort) -> None:
        self._steps = steps
        self._port = port

    async def run(self, command: str, timeout_s: float = 10.0) -> CommandResult:
        """Run ``command`` for at most ``timeout_s`` seconds, of the clock and of a processor.

        Raises: ComputerError for a command or a time that no sandbox takes.
        """
        arguments, request = _run_request(command, timeout_s)
        if self._steps.replays(RUN, arguments):
            return _result(self._steps.replayed())
        with self._steps.under_way(RUN):
            return _result(await self._port.ask({**request, "ordinal": self._steps.taken()}))

    def run_now(self, command: str, timeout_s: float = 10.0) -> CommandResult:
        """``run`` for an agent that is a plain ``def``."""
        arguments, request = _run_request(command, timeout_s)
        if self._steps.replays(RUN, arguments):
            return _result(self._steps.replayed())
        with self._steps.under_way(RUN):
            return _result(self._port.ask_now({**request, "ordinal": self._steps.taken()}))

    async def write(self, files: "Mapping[str, str | bytes]") -> None:
        """Write files, named from the working directory on; folders are made. Text becomes UTF-8.

        Raises: ComputerError for a path outside, and for too much; then nothing is written.
        """
        request = self._write_request(files)
        with self._steps.under_way(WRITE):
            if request is not None:
                _require_done(await self._port.ask(request))

    def write_now(self, files: "Mapping[str, str | bytes]") -> None:
        """``write`` for an agent that is a plain ``def``."""
        request = self._write_request(files)
        with self._steps.under_way(WRITE):
            if request is not None:
                _require_done(self._port.ask_now(request))

    async def read(self, path: str) -> bytes:
        """A file's content. Raises: ComputerError for a path outside, and where no file is."""
        return _content(await self._port.ask(self._read_request(path)))

    def read_now(self, path: str) -> bytes:
        """``read`` for an agent that is a plain ``def``."""
        return _content(self._port.ask_now(self._read_request(path)))

    def _write_request(self, files: "Mapping[str, str | bytes]") -> "dict[str, Any] | None":
        """The request; None where a replay says that it was refused, which is raised."""
        contents = {
            path: content.encode() if isinstance(content, str) else bytes(content) for path, content in files.items()
        }
        for path in contents:
            require_inside(path)
        size = sum(len(path) + len(content) for path, content in contents.items())
        if size > MAX_WRITE_BYTES or len(contents) > MAX_WRITE_FILES:
            raise ComputerError(
                f"{len(contents)} files of {size} bytes: one write takes {MAX_WRITE_FILES} of {MAX_WRITE_BYTES} bytes in all"
            )
        digests = {path: hashlib.sha256(content).hexdigest() for path, content in contents.items()}
        arguments = arguments_digest((digests,))
        encoded = {path: base64.b64encode(content).decode() for path, content in contents.items()}
        request = {"do": "write", "arguments": arguments, "files": encoded}
        if self._steps.replays(WRITE, arguments):
            # The record has no contents: this run has them.
            _require_done(self._steps.replayed())
            return {**request, "ordinal": self._steps.ordinal - 1}
        return {**request, "ordinal": self._steps.taken()}

    def _read_request(self, path: str) -> "dict[str, Any]":
        require_inside(path)
        self._steps.require_idle(f"read {path[:100]}")
        return {"do": "read", "path": path, "ordinal": self._steps.ordinal}


def require_inside(path: str) -> None:
    """Raises: ComputerError for a path that does not name a file of the working directory."""
    if not isinstance(path, str):
        raise ComputerError(f"the path {path!r:.100} is no text")
    size = len(path.encode("utf-8", "replace"))
    if "\0" in path or size > MAX_PATH_BYTES or any(part in ("", ".", "..") for part in path.split("/")):
        raise ComputerError(
            f"the path {path[:100]!r} must be relative to the working directory, without . and .., of at most "
            f"{MAX_PATH_BYTES} bytes"
        )
    if path.encode("utf-8", "replace").decode() != path:
        raise ComputerError(f"the path {path[:100]!r} is not valid Unicode")


def _run_request(command: str, timeout_s: float) -> "tuple[str, dict[str, Any]]":
    if not isinstance(command, str) or not command.strip() or "\0" in command:
        raise ComputerError(f"the command {command!r:.100} must be a text without zero bytes")
    size = len(command.encode("utf-8", "replace"))
    if size > MAX_COMMAND_BYTES:
        raise ComputerError(f"the command has {size} bytes, {MAX_COMMAND_BYTES} allowed: write a file and run it")
    if command.encode("utf-8", "replace").decode() != command:
        raise ComputerError(f"the command {command[:100]!r} is not valid Unicode")
    if not 0 < timeout_s < float("inf"):
        raise ComputerError(f"timeout_s is {timeout_s!r}: it must be a number above 0")
    timeout_s = float(timeout_s)
    arguments = arguments_digest((command, timeout_s))
    return arguments, {"do": "run", "arguments": arguments, "command": command, "timeout_s": timeout_s}


def _require_done(answer: "dict[str, Any]") -> None:
    if "error" in answer:
        raise ComputerError(answer["error"])


def _result(answer: "dict[str, Any]") -> CommandResult:
    _require_done(answer)
    return CommandResult(answer["exit_code"], answer["output"], answer["limit"])


def _content(answer: "dict[str, Any]") -> bytes:
    _require_done(answer)
    return base64.b64decode(answer["content"])

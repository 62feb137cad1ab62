"""Init: it writes files, runs programs and says how they ended, until its standard input ends."""

import gc
import importlib
import os
import signal
import sys
import time
from typing import Any

from .filter import require_filters
from .frames import read_frame, write_frame
from .memory import Memory
from .spawner import Spawner
from .watch import Watch, is_overfull

PRELOADED = (
    "bisect", "collections", "copy", "functools", "heapq", "itertools", "math", "operator", "random", "re", "string",
    "typing",
)  # fmt: skip
"""What programs import most: each run has it for nothing, and init starts a few milliseconds later."""


TRIAL = {
    "argv": [os.path.join(os.path.dirname(__file__), "trial.py")], "python": True, "prepares": False,
    "limits": {
        "wall_s": 20, "cpu_s": 10, "memory_bytes": 512 << 20, "processes": 32, "output_bytes": 4096, "file_bytes": 64 << 20,
        "scratch_bytes": 64 << 20, "open_files": 256,
    },
}  # fmt: skip
"""With the usual limits, because a machine may give less."""


class RunsInside:
    """Runs programs, one at a time."""

    def __init__(self, memory: Memory) -> None:
        """Raises: OSError where the kernel has no filters."""
        self.memory = memory
        self.spawner = Spawner(memory, require_filters())

    def run(self, request: dict[str, Any], stdin: bytes) -> tuple[dict[str, Any], list[bytes]]:
        """Run a program to its end or to a limit; gives the answer's header and its two outputs. Raises: OSError."""
        began = time.monotonic()
        self.memory.begin(request["limits"])
        first, ends = self.spawner.start(request)
        watch = Watch(request, stdin, self.memory, (1, os.getpid(), self.spawner.pid), ends)
        watch.until_end(began)
        # It ends after everything in its namespace has: nothing of the run is left.
        self.spawner.end(first)
        watch.rest(watch.report)
        said = watch.lines()
        wall_s = time.monotonic() - began
        outputs = watch.close()
        if "failed" in said:
            return {"failed": said["failed"]}, outputs
        if watch.limit is None:
            # Process 1 ends before its program only by the kernel's hand, where memory ends.
            if "status" not in said or self.memory.was_exceeded():
                watch.limit = "memory"
            elif request["prepares"] and is_overfull("/sandbox"):
                watch.limit = "file"
        return {**ending(said.get("status"), said.get("cpu_s", watch.cpu_s), watch), "wall_s": wall_s}, outputs

    def require_walls(self) -> None:
        """Run the trial. Raises: OSError where a wall is missing."""
        answer, outputs = self.run(TRIAL, b"")
        if answer.get("exit_code") != 0:
            said = answer.get("failed") or outputs[1].decode(errors="replace").strip() or f"the trial ended so: {answer}"
            raise OSError(said)


def ending(status: int | None, cpu_s: float, watch: Watch) -> dict[str, Any]:
    """How it ended: by itself, by a signal, or by which limit."""
    limit, code, number = watch.limit, None, None
    if limit is None and status is not None:
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            limit = "file" if number == signal.SIGXFSZ else "cpu" if cpu_s > watch.limits["cpu_s"] else None
        else:
            code = os.WEXITSTATUS(status)
    return {"limit": limit, "exit_code": code, "signal": None if limit else number, "cpu_s": cpu_s}


def put(names: list[str], blobs: list[bytes]) -> None:
    """Write files into /sandbox, whatever a preparation has left at their places."""
    for name, content in zip(names, blobs, strict=True):
        path = "/sandbox"
        *folders, last = name.split("/")
        for folder in folders:
            path = os.path.join(path, folder)
            if os.path.islink(path) or not os.path.isdir(path):
                remove(path)
                os.mkdir(path)
            os.chmod(path, 0o755)
        path = os.path.join(path, last)
        remove(path)
        with open(path, "xb") as file:
            file.write(content)
        os.chmod(path, 0o755)


def remove(path: str) -> None:
    """Make room for a file or a folder. A folder that is there may be too deep to delete, and is put aside."""
    if os.path.isdir(path) and not os.path.islink(path):
        os.chmod(path, 0o700)
        os.rename(path, os.path.join("/sandbox", f".aside-{time.monotonic_ns()}"))
    elif os.path.lexists(path):
        os.unlink(path)


def inherit_nothing() -> None:
    """Handlers, masks and files that whoever started this has left to it, and that every run would inherit."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.umask(0o022)


def main(arguments: list[str]) -> None:
    """Serve until standard input ends. ``arguments``: "try" for a trial, or nothing, and the open files of a cgroup."""
    for name in PRELOADED:
        importlib.import_module(name)
    inherit_nothing()
    # What is here now is every run's: a collection would copy all of it.
    gc.collect()
    gc.freeze()
    try:
        runs = RunsInside(Memory([int(number) for number in arguments[1:]]))
        if arguments[0] == "try":
            runs.require_walls()
    except OSError as error:
        sys.exit(str(error))
    write_frame({"ready": True})
    while True:
        request, blobs = read_frame()
        try:
            if request["do"] == "put":
                put(request["names"], blobs)
                write_frame({"done": True})
            else:
                answer, outputs = runs.run(request, blobs[0])
                write_frame(answer, *outputs)
        except OSError as error:
            write_frame({"failed": str(error)})

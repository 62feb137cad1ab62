"""Init: it writes files, runs programs and says how they ended, until its standard input ends."""

import gc
import importlib
import os
import signal
import time
from typing import Any

from .frames import read_frame, write_frame
from .program import start
from .watch import Watch

PRELOADED = (
    "bisect", "collections", "copy", "functools", "heapq", "itertools", "math", "operator", "random", "re", "string",
    "typing",
)  # fmt: skip
"""What programs import most: each run has it for nothing, and init starts a few milliseconds later."""


def run(request: dict[str, Any], stdin: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """Run a program to its end or to a limit; gives the answer's header and its two outputs."""
    began = time.monotonic()
    first, *ends = start(request)
    watch = Watch(request, stdin, *ends)
    watch.until_end(began)
    # It ends after everything in its namespace has: nothing of the run is left.
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    watch.rest(watch.report)
    said = watch.lines()
    wall_s = time.monotonic() - began
    outputs = watch.close()
    if "failed" in said:
        return {"failed": said["failed"]}, outputs
    return {**ending(said.get("status"), said.get("cpu_s", watch.cpu_s), watch), "wall_s": wall_s}, outputs


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
    """Write files into /sandbox."""
    for name, content in zip(names, blobs, strict=True):
        path = os.path.join("/sandbox", name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)
        os.chmod(path, 0o755)


def main() -> None:
    """Serve until standard input ends."""
    for name in PRELOADED:
        importlib.import_module(name)
    # What is here now is every run's: a collection would copy all of it.
    gc.collect()
    gc.freeze()
    write_frame({"ready": True})
    while True:
        request, blobs = read_frame()
        try:
            if request["do"] == "put":
                put(request["names"], blobs)
                write_frame({"done": True})
            else:
                answer, outputs = run(request, blobs[0])
                write_frame(answer, *outputs)
        except OSError as error:
            write_frame({"failed": str(error)})

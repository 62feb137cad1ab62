"""Becomes a user's program, under limits."""

import ctypes
import os
import signal
import sys
from typing import Any

from .limits import allow_cpu, limit_process

PR_SET_PDEATHSIG = 1
NOT_FOUND = 127
"""The exit status of a program that cannot be started, as shells have it."""


def become_program(settings: dict[str, Any]) -> None:
    """Limit this process, then run ``settings["program"]`` in its place."""
    _end_with(settings["parent"])
    limit_process(settings["limits"])
    allow_cpu(settings["limits"].get("cpu_s"))
    program = settings["program"]
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.stderr.write(f"{program[0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(NOT_FOUND)


def _end_with(parent: int) -> None:
    """Let the kernel end this process, also as the program that it becomes, when the parent is killed."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)

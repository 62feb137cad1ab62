"""Becomes a user's program, under limits."""

import os
import sys
from typing import Any

from .limits import allow_cpu, limit_process

NOT_FOUND = 127
"""The exit status of a program that cannot be started, as shells have it."""


def become_program(settings: dict[str, Any]) -> None:
    """Limit this process, then run ``settings["program"]`` in its place."""
    limit_process(settings["limits"])
    allow_cpu(settings["limits"].get("cpu_s"))
    program = settings["program"]
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.stderr.write(f"{program[0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(NOT_FOUND)

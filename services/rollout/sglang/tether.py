"""Runs a command that dies with its parent: ``python tether.py PARENT_PID COMMAND...``.

The kernel kills this process when the thread that started it ends, even by kill -9 (PR_SET_PDEATHSIG survives exec). It
imports nothing of the project, so it costs only the 20 ms of a bare interpreter.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Replace this process by the command; exit with status 1 when the parent has already gone."""
    parent_pid, command = int(arguments[0]), arguments[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The parent may have died before the line above took effect.
    if os.getppid() != parent_pid:
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])

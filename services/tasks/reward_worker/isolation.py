"""The rights that a reward worker gives up before it runs the user's code on text of a model.

The user chooses the reward code, but not its input: a parser that evaluates, or a bug in one, must not reach the network or
fill the disk. Linux only; a right that the kernel does not take away is reported, not hidden.
"""

import ctypes
import os
import sys
from collections.abc import Mapping
from typing import Final

from gspo_services.shared.runtime.user_modules import USERS_FOLDER
from gspo_services.tasks.worker.limits import limit_process

CLONE_NEWIPC: Final = 0x08000000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWNET: Final = 0x40000000
PR_SET_NO_NEW_PRIVS: Final = 38

MAX_FILE_BYTES: Final = 0
"""The size of a file that a job writes: no file may grow. The socket to the parent is not a file."""
MAX_OPEN_FILES: Final = 256
MAX_PROCESSES: Final = 64
"""Threads included. The limit binds ordinary users; root is exempt."""
KEPT_VARIABLES: Final = (
    "PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH",
    "OMP_NUM_THREADS", USERS_FOLDER,
)  # fmt: skip


def worker_environment(environment: Mapping[str, str], folder: str = "") -> dict[str, str]:
    """A worker's environment: the variables that an interpreter needs, and no token, key or address of ours.

    ``folder`` is its home and the place of its temporary files: torch, for one, makes folders there when it is imported.
    "": it has neither.
    """
    kept = {name: environment[name] for name in KEPT_VARIABLES if name in environment}
    places = {"HOME": folder, "TMPDIR": folder} if folder else {"HOME": "/nonexistent"}
    return {**kept, **places, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}


def isolate(memory_bytes: int, *, network: bool = False, file_bytes: int = MAX_FILE_BYTES) -> str:
    """Give up network, privileges and resources, for good. Call it while the process has one thread.

    ``network`` keeps the network, for rewards that ask a service; ``file_bytes`` is the size to which a file may grow.
    Returns "" or why the network can still be reached although it should not.
    """
    limit_process({"memory_bytes": memory_bytes, "file_bytes": file_bytes, "open_files": MAX_OPEN_FILES})
    if sys.platform != "linux":
        return f"no namespaces on {sys.platform}"
    libc = ctypes.CDLL(None, use_errno=True)
    refused = ""
    # Only a user namespace of its own gives an ordinary user the other two.
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWIPC | (0 if network else CLONE_NEWNET)) != 0:
        refused = f"unshare: {os.strerror(ctypes.get_errno())}"
    else:
        # Only in the new namespace: elsewhere the limit would count all processes of this user.
        limit_process({"processes": MAX_PROCESSES})
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return "" if network else refused

"""What the system must allow before a fleet of N starts: open files and memory. Pure but for the readings."""

import resource
from typing import Final

import psutil

FILES_PER_ROLLOUT: Final = 5
"""In its own process: the connection, and what libzmq wakes its DEALER and the ends of its monitor with."""
FILES_PER_PROCESS: Final = 96
BYTES_PER_ROLLOUT: Final = 512 * 1024
"""In its own process, with 64 episodes and what is not acknowledged."""
BYTES_PER_PROCESS: Final = 96 * 1024 * 1024


def objections(rollouts: int, processes: int, files_allowed: int, bytes_available: int) -> list[str]:
    """What is too small for a fleet, each with the way out; empty: it fits."""
    found = []
    in_one = -(-rollouts // processes)
    files = FILES_PER_PROCESS + max(FILES_PER_ROLLOUT * in_one, rollouts)  # The broker has one of each rollout.
    if files > files_allowed:
        found.append(
            f"open files: {rollouts:,} rollouts in {processes} processes need {files:,} in one, and {files_allowed:,} are "
            f"allowed: run `ulimit -n {files}` in this shell first (up to `ulimit -Hn`, or as root), or use more --processes"
        )
    needed = rollouts * BYTES_PER_ROLLOUT + (processes + 2) * BYTES_PER_PROCESS
    if needed > bytes_available:
        found.append(
            f"memory: {rollouts:,} rollouts need about {needed / 2**30:.1f} GiB, and {bytes_available / 2**30:.1f} GiB are "
            "available: use fewer --rollouts"
        )
    return found


def what_is_too_small(rollouts: int, processes: int) -> list[str]:
    """The same for this machine as it is now."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return objections(rollouts, processes, allowed, psutil.virtual_memory().available)

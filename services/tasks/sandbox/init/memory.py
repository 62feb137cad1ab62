"""Memory of a run: what its processes have, counted here, and what nobody has, counted by a cgroup where there is one.

Without a cgroup no page stays that no process maps: the filter and the mounts leave no way to such memory but files, which
have a size, buffers of sockets, which are counted as if they were full, and pipes, of which the kernel gives a user 64 MiB.
"""

import errno
import os
import time
from collections.abc import Container

PAGE = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")
SLACK_BYTES = 16 << 20
"""What the kernel needs for a run that does nothing, with room to spare."""
TRIES, TRY_S = 50, 0.02
"""An old cgroup takes a limit only when what ended has gone: a last socket may take a moment."""


def resident() -> int:
    """Bytes of memory of this process."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * PAGE


def used(inherited: int, others: Container[int]) -> tuple[int, float]:
    """Bytes of memory and seconds of processor time that everything but ``others`` uses now.

    Of each process, ``inherited`` bytes are not counted.
    """
    memory, seconds = buffered(), 0.0
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) in others:
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        memory += max(0, int(fields[21]) * PAGE - inherited)
        seconds += sum(int(field) for field in fields[11:15]) / TICKS
    return memory, seconds


def number_in(path: str, default: int) -> int:
    """The number that a file of the kernel's holds."""
    try:
        with open(path, "rb") as file:
            return int(file.read())
    except (OSError, ValueError):
        return default


SOCKET_BYTES = number_in("/proc/sys/net/core/wmem_default", 212992)
"""What one socket may hold; the filter lets nobody ask for more."""


def buffered() -> int:
    """Bytes that the sockets of this network namespace may hold; the filter leaves those of one family."""
    try:
        with open("/proc/net/unix", "rb") as file:
            return SOCKET_BYTES * (len(file.readlines()) - 1)
    except OSError:
        return 0


class Memory:
    """A run's cgroup, by three open files of it; without them nothing is done."""

    def __init__(self, files: list[int]) -> None:
        """``files``: of its processes, of its limit, and of its events."""
        self.files = files
        self.kills = 0

    def begin(self, limits: dict[str, int]) -> None:
        """Bound the next run. Raises: OSError."""
        if not self.files:
            return
        disk = os.statvfs("/sandbox")
        there = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
        most = limits["memory_bytes"] + limits["scratch_bytes"] + there + SLACK_BYTES
        for attempt in range(TRIES):
            try:
                os.pwrite(self.files[1], str(most).encode(), 0)
                break
            except OSError as error:
                if error.errno != errno.EBUSY or attempt == TRIES - 1:
                    raise
                time.sleep(TRY_S)
        self.kills = self.count()

    def join(self) -> None:
        """This process belongs to the run from here on."""
        if self.files:
            os.write(self.files[0], b"0")

    def count(self) -> int:
        """How many processes the kernel has ended for their memory."""
        for line in os.pread(self.files[2], 4096, 0).splitlines():
            if line.startswith(b"oom_kill "):
                return int(line.split()[1])
        return 0

    def was_exceeded(self) -> bool:
        """Whether one of this run's processes was ended for its memory."""
        return bool(self.files) and self.count() != self.kills

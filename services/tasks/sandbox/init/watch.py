"""A run's streams, and the limits that belong to all of its processes together."""

import json
import os
import select
import time
from collections.abc import Container, Sequence
from typing import Any

from .memory import Memory, resident, used

LOOK_S = 0.05
"""How often memory and processor time of a running program are added up."""
MOST_FILES = 65536
"""In /sandbox, where a compiler writes."""


def is_overfull(folder: str) -> bool:
    """Whether a file system has more files, or less room, than the next files need."""
    found = os.statvfs(folder)
    return found.f_files - found.f_ffree > MOST_FILES or 2 * found.f_bfree < found.f_blocks


class Watch:
    """The streams of one run, and the limits that belong to all of its processes together."""

    def __init__(
        self, request: dict[str, Any], stdin: bytes, memory: Memory, others: Container[int], ends: Sequence[int]
    ) -> None:
        """``others``: processes that are not the run's."""
        to_in, from_out, from_err, report = ends
        self.limits, self.stdin, self.report = request["limits"], memoryview(stdin), report
        self.memory, self.others, self.prepares = memory, others, request["prepares"]
        # A script's processes have all of init's memory, which they share.
        self.inherited = resident() if request["python"] else 0
        self.to_in: int | None = to_in
        self.kept: dict[int, list[bytes]] = {from_out: [], from_err: []}
        self.sizes = {from_out: 0, from_err: 0}
        self.open = {from_out, from_err, report}
        self.said = b""
        self.taken = 0
        self.limit: str | None = None
        self.cpu_s = 0.0
        for fd in (to_in, from_out, from_err, report):
            os.set_blocking(fd, False)
        if not stdin:
            self.close_input()

    def close_input(self) -> None:
        """The program reads the end of its input."""
        if self.to_in is not None:
            os.close(self.to_in)
            self.to_in = None

    def until_end(self, began: float) -> None:
        """Pass input and output on until the program has ended or is over a limit."""
        look = began + LOOK_S
        while self.report in self.open and self.limit is None:
            now = time.monotonic()
            if now - began >= self.limits["wall_s"]:
                self.limit = "wall"
            elif now >= look:
                self.look()
                look = time.monotonic() + LOOK_S
            else:
                self.turn(min(look, began + self.limits["wall_s"]) - now)

    def look(self) -> None:
        """Compare what is used with what may be."""
        memory, self.cpu_s = used(self.inherited, self.others)
        if memory > self.limits["memory_bytes"] or self.memory.was_exceeded():
            self.limit = "memory"
        elif self.prepares and is_overfull("/sandbox"):
            self.limit = "file"
        elif self.cpu_s > self.limits["cpu_s"]:
            self.limit = "cpu"

    def turn(self, seconds: float) -> None:
        """Wait for one thing to happen, at most so long."""
        writers = [] if self.to_in is None else [self.to_in]
        readable, writable, _ = select.select(sorted(self.open), writers, [], max(0.0, seconds))
        if writable and self.to_in is not None:
            try:
                self.stdin = self.stdin[os.write(self.to_in, self.stdin[:65536]) :]
            except BlockingIOError:
                pass
            except OSError:
                self.stdin = self.stdin[:0]
            if not self.stdin:
                self.close_input()
        for fd in readable:
            self.read(fd)

    def read(self, fd: int) -> None:
        """Take what a stream has."""
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return
        self.taken += len(data)
        if not data:
            self.open.discard(fd)
        elif fd == self.report:
            self.said += data
        else:
            room = self.limits["output_bytes"] - self.sizes[fd]
            self.kept[fd].append(data[:room])
            self.sizes[fd] += len(data[:room])
            if len(data) > room:
                self.limit = "output"

    def rest(self, fd: int) -> None:
        """Everything that a stream still has, when nobody writes any more.

        Its end may not come: a writer that travels in a circle of sockets is open until the kernel looks for such circles.
        """
        size = -1
        while fd in self.open and size != self.taken and (fd == self.report or self.limit != "output"):
            size = self.taken
            self.read(fd)

    def lines(self) -> dict[str, Any]:
        """What the report has so far."""
        said = {}
        for line in self.said.splitlines():
            said.update(json.loads(line))
        return said

    def close(self) -> list[bytes]:
        """Close all ends; gives the two outputs."""
        self.close_input()
        for fd in self.kept:
            self.rest(fd)
        for fd in (*self.kept, self.report):
            os.close(fd)
        return [b"".join(kept) for kept in self.kept.values()]

"""The thread that tells the parent whether the event loop still turns, and what holds it up.

The parent decides what is too long, and kills: a loop that is held up by ``while True`` cannot be told to stop.
"""

import asyncio
import sys
import threading
import time
from types import FrameType
from typing import Any

from .failures import place_of
from .frames import FrameSocket

LATE_S = 0.25
"""The place is reported only of a loop that is later than this."""


class LoopMonitor:
    """Reports for how long the loop has not turned though it could have, every ``heartbeat_s``.

    Time in which the machine gave the loop's thread no processor is not counted, and neither is that of an import.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, frames: FrameSocket, owners: "dict[Any, int]", heartbeat_s: float):
        self._loop = loop
        self._frames = frames
        self._owners = owners
        self._heartbeat_s = heartbeat_s
        self._main_thread = threading.get_ident()
        self._schedule = f"/proc/self/task/{threading.get_native_id()}/schedstat"
        self._turned_at = time.monotonic()
        self._waited_s = waited_s(self._schedule)
        self._imported_s = 0.0

    def start(self) -> None:
        """Start both halves: the one that turns with the loop, and the thread that watches it."""
        self._turn()
        threading.Thread(target=self._watch, name="loop-monitor", daemon=True).start()

    def _turn(self) -> None:
        self._turned_at = time.monotonic()
        self._waited_s = waited_s(self._schedule)
        self._imported_s = 0.0
        self._loop.call_later(self._heartbeat_s / 2, self._turn)

    def _watch(self) -> None:
        nothing = threading.Event()
        looked_at = time.monotonic()
        while not nothing.wait(self._heartbeat_s):
            now, since_s = time.monotonic(), time.monotonic() - looked_at
            looked_at = now
            if is_import(sys._current_frames().get(self._main_thread)):
                self._imported_s += min(since_s, now - self._turned_at)
            excused_s = self._imported_s + waited_s(self._schedule) - self._waited_s
            late_s = max(0.0, now - self._turned_at - self._heartbeat_s / 2 - excused_s)
            if since_s > 2 * self._heartbeat_s + 1.0:
                late_s = 0.0  # This thread was held up as well: the whole process was stopped, or C code kept the lock.
            self._frames.send({"say": "alive", "late_s": late_s, **self._culprit(late_s)})

    def _culprit(self, late_s: float) -> "dict[str, Any]":
        if late_s < LATE_S:
            return {"episode": None, "where": ""}
        task = asyncio.current_task(self._loop)
        return {
            "episode": None if task is None else self._owners.get(task),
            "where": place_of(sys._current_frames().get(self._main_thread)),
        }


def waited_s(path: str) -> float:
    """Return for how many seconds a thread was ready and had no processor: the second number of its schedstat, in
    nanoseconds; 0 where the system does not say.
    """
    try:
        with open(path) as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def is_import(frame: "FrameType | None") -> bool:
    """Whether an import is under way, at whatever depth."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False

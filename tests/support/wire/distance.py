"""A long way between two network namespaces: packets that pass are delayed, and a share of them is lost.

    python -m tests.support.wire.distance NAMESPACE_A NAMESPACE_B DELAY_S LOSS

It makes an interface ``far0`` in each namespace, which needs root and /dev/net/tun, writes a line when both are there, and
ends with its standard input. The last line counts packets. It is a process of its own, so that no other Python delays it.
"""

import argparse
import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

CLONE_NEWNET: Final = 0x40000000
INTERFACE: Final = "far0"
_TUNSETIFF: Final = 0x400454CA
_IFF_TUN: Final = 0x0001
_IFF_NO_PI: Final = 0x1000
_PACKET_BYTES: Final = 65_536
_AT_ONCE: Final = 256
"""Packets read before any is passed on."""


def open_interface(namespace: str) -> int:
    """A file descriptor whose packets are those of the interface ``far0`` in the namespace."""
    with Path("/run/netns", namespace).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", INTERFACE.encode(), _IFF_TUN | _IFF_NO_PI))
    return descriptor


class Line:
    """The packets on their way. Each arrives ``delay_s`` after it was sent, or never."""

    def __init__(self, ends: tuple[int, int], delay_s: float, loss: float) -> None:
        self._other = {ends[0]: ends[1], ends[1]: ends[0]}
        self._delay_s = delay_s
        self._loss = loss
        self._random = random.Random(0)
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self.num_sent = self.num_lost = 0

    @property
    def wait_s(self) -> float | None:
        """Until the next packet arrives; None: no packet is under way."""
        return max(0.0, self._under_way[0][0] - time.monotonic()) if self._under_way else None

    def take(self, end: int) -> None:
        """Read what an end sends."""
        for _ in range(_AT_ONCE):
            try:
                packet = os.read(end, _PACKET_BYTES)
            except BlockingIOError:
                return
            self.num_sent += 1
            if self._random.random() < self._loss:
                self.num_lost += 1
                continue
            arrival = time.monotonic() + self._delay_s
            heapq.heappush(self._under_way, (arrival, self.num_sent, self._other[end], packet))

    def deliver(self) -> None:
        """Write the packets whose time has come. One that an interface refuses, as it is not up yet, is not counted."""
        while self._under_way and self._under_way[0][0] <= time.monotonic():
            *_, end, packet = heapq.heappop(self._under_way)
            with suppress(OSError):
                os.write(end, packet)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("namespaces", nargs=2)
    parser.add_argument("delay_s", type=float)
    parser.add_argument("loss", type=float)
    arguments = parser.parse_args()
    ends = (open_interface(arguments.namespaces[0]), open_interface(arguments.namespaces[1]))
    line = Line(ends, arguments.delay_s, arguments.loss)
    print("ready", flush=True)
    stdin = sys.stdin.fileno()
    while True:
        readable, _, _ = select.select([*ends, stdin], [], [], line.wait_s)
        if stdin in readable:
            break
        for end in readable:
            line.take(end)
        line.deliver()
    print(json.dumps({"sent": line.num_sent, "lost": line.num_lost}), flush=True)


if __name__ == "__main__":
    main()

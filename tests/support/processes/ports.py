"""Ports for servers that a test starts, kills, and starts again on the same port.

The kernel gives connections ports from a range of its own (32768 and up). A server's port from that range can be taken by a
connection of another process while the server is down, so tests use the ports below it.
"""

import random
import socket
from contextlib import ExitStack
from typing import Final

LOWEST: Final = 20_000
HIGHEST: Final = 32_000
# Test sessions run side by side: none may get the ports of another by having its seed.
_RANDOM: Final = random.SystemRandom()


def free_ports(count: int) -> list[int]:
    """Distinct ports of the loopback interface that nobody listens on now."""
    found: list[int] = []
    with ExitStack() as stack:
        while len(found) < count:
            probe = stack.enter_context(socket.socket())
            port = _RANDOM.randrange(LOWEST, HIGHEST)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            found.append(port)
    return found


def free_port() -> int:
    """One of ``free_ports``."""
    return free_ports(1)[0]


def free_pair() -> int:
    """The lower of two consecutive free ports, for the metrics of two rollouts."""
    while True:
        port = free_port()
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
        return port

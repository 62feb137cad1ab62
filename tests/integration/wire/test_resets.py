"""A connection whose input was stopped and then reset must not end the process: libzmq aborts in some of these states."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gspo_protocol.channels import WORK
from tests.support.wire.zmtp import ZmtpPeer, message, ping

TIMERS_S = 3.0
"""Time for any timer of a connection to fire."""


@contextlib.contextmanager
def idle_ends() -> Iterator[tuple[subprocess.Popen[str], int]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.wire.idle_ends"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def ended(process: subprocess.Popen[str], wait_s: float) -> int | None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(wait_s)
    return None


@pytest.mark.parametrize("behind", [b"", ping()], ids=["flood", "ping in the buffer"])
def test_a_reset_while_nobody_reads_does_not_end_the_process(behind: bytes) -> None:
    """The receiver reads nothing: its queue is over every bound when the connection breaks."""
    flood = message([b"x" * 40]) * (4 * WORK.window)
    with idle_ends() as (process, port):
        for number in range(4):
            peer = ZmtpPeer(port, b"peer-%d" % number)
            peer.send_for(flood + behind + flood, 0.2)
            peer.reset()
        assert ended(process, TIMERS_S) is None
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(20) == 0

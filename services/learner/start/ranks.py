"""Starts the ranks of one machine as processes, passes signals on to them, and ends with their status.

On several machines it does so on each, and only the ranks meet. torchrun does it too, but where one machine is asked to
stop, its agents on the others stay for five minutes, with the old meeting place open. Ranks may also be started by it, or by
whatever sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog

from services.runtime.lifecycle import die_with_parent, module_command

log = structlog.get_logger()

RANKS_STOP_S: Final = 590.0
"""For the ranks to end their batch and save after SIGTERM: a little less than ``gspo run`` gives the learner."""
OTHERS_STOP_S: Final = 30.0
"""For the others when one rank has failed: they wait in a collective that will not come about."""
LOOK_S: Final = 0.1


def is_rank() -> bool:
    """Whether this process is one of several ranks that somebody else has started."""
    return "RANK" in os.environ


@dataclass(frozen=True, kw_only=True)
class Node:
    """One of several machines."""

    index: int
    num_nodes: int
    host: str
    """Of node 0."""
    port: int
    """Where rank 0 awaits the others."""


def run_ranks(
    module: str, arguments: Sequence[str], num_ranks: int, *, node: Node | None = None, stop_s: float = RANKS_STOP_S
) -> int:
    """Run ``python -m module *arguments`` as ``num_ranks`` ranks, as many as on each other machine, if there are others.

    ``node``: None for a machine alone. Returns 0, or the status of the first rank that failed.
    """
    if node is None:
        node = Node(index=0, num_nodes=1, host="127.0.0.1", port=_free_port())
    log.info("starting_ranks", ranks=num_ranks, node=node.index, nodes=node.num_nodes)
    ranks: list[subprocess.Popen[bytes]] = []
    stops: list[float] = []

    def stop(*_: object) -> None:
        stops.append(time.monotonic() + stop_s)
        _signal(ranks, signal.SIGTERM)

    former = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for rank in range(num_ranks):
            environment = {
                **os.environ,
                "RANK": str(node.index * num_ranks + rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(node.num_nodes * num_ranks),
                "LOCAL_WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": node.host,
                "MASTER_PORT": str(node.port),
            }
            ranks.append(
                subprocess.Popen(
                    module_command(module, *arguments),
                    env=environment,
                    # Ctrl-C on a terminal reaches this process alone, which passes it on.
                    start_new_session=True,
                    # Left alone they would train on, beside their successors and on the same ports.
                    preexec_fn=partial(die_with_parent, signal.SIGKILL, parent_pid=os.getpid()),
                )
            )
        if stops:
            _signal(ranks, signal.SIGTERM)  # It came while they were being started.
        return _wait(ranks, lambda: stops[0] if stops else None)
    finally:
        _signal(ranks, signal.SIGKILL)
        for process in ranks:
            process.wait()
        for number, handler in former.items():
            signal.signal(number, handler)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Within the block SIGTERM and SIGINT end the process: a rank waits for others outside Python, where no handler runs."""
    former = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _wait(ranks: Sequence[subprocess.Popen[bytes]], deadline: Callable[[], float | None]) -> int:
    """Until all have ended, or one has failed and the others had their time."""
    failed, failed_at = 0, 0.0
    # All are asked, also behind one that lives: ``returncode`` is known only of those that were.
    while None in [process.poll() for process in ranks]:
        now = time.monotonic()
        end = deadline()
        ended = [(rank, process.returncode) for rank, process in enumerate(ranks) if _failed(process, asked=end is not None)]
        if ended and not failed:
            failed, failed_at = _status(ended[0][1]), now
            log.error("rank_failed", rank=ended[0][0], status=ended[0][1])
            _signal(ranks, signal.SIGTERM)
        if (failed and now - failed_at > OTHERS_STOP_S) or (end is not None and now > end):
            log.error("ranks_killed", ranks=[rank for rank, process in enumerate(ranks) if process.returncode is None])
            return failed or 1
        time.sleep(LOOK_S)
    asked = deadline() is not None
    return failed or next((_status(process.returncode) for process in ranks if _failed(process, asked=asked)), 0)


def _failed(process: subprocess.Popen[bytes], *, asked: bool) -> bool:
    """Whether it has ended otherwise than well. Asked to stop while it waits for others, a rank ends by the signal."""
    return bool(process.returncode) and not (asked and process.returncode == -signal.SIGTERM)


def _status(returncode: int) -> int:
    """As a shell says it: 128 + the signal for a process that a signal ended."""
    return 128 - returncode if returncode < 0 else returncode


def _signal(ranks: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in ranks:
        if process.poll() is None:
            process.send_signal(number)


def _free_port() -> int:
    """For the ranks' meeting place, which rank 0 opens on the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

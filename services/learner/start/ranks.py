"""Starts the ranks of one machine as processes, passes signals on to them, and ends with their status.

With several machines it runs on each, and only the ranks connect to each other. torchrun does the same, but when one machine
is stopped, torchrun's agents on the others stay for five minutes, with the old rendezvous open. torchrun, or anything
else that sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, may also start the ranks.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog

from gspo_services.shared.net import held_port
from gspo_services.shared.runtime.lifecycle import die_with_parent, module_command

log = structlog.get_logger()

RANKS_STOP_S: Final = 590.0
"""Time for the ranks to end their batch and save after SIGTERM: a little less than ``gspo run`` gives the learner."""
OTHERS_STOP_S: Final = 30.0
"""Time for the other ranks after one has failed: they wait in a collective that will never complete."""
LOOK_S: Final = 0.1


def is_rank() -> bool:
    """Return whether another process has started this one as one of several ranks."""
    return "RANK" in os.environ


@dataclass(frozen=True, kw_only=True)
class Node:
    """One of several machines."""

    index: int
    num_nodes: int
    host: str
    """The address of node 0."""
    port: int
    """The port on which rank 0 awaits the others."""


def run_ranks(
    module: str, arguments: Sequence[str], num_ranks: int, *, node: Node | None = None, stop_s: float = RANKS_STOP_S
) -> int:
    """Run ``python -m module *arguments`` as ``num_ranks`` ranks. Every machine runs equally many.

    ``node``: None for a single machine. Returns 0, or the status of the first rank that failed.
    """
    if node is None:
        # Rank 0 opens its rendezvous seconds later, after it has imported torch.
        with held_port("127.0.0.1") as port:
            node = Node(index=0, num_nodes=1, host="127.0.0.1", port=port)
            return _run(module, arguments, num_ranks, node=node, stop_s=stop_s)
    return _run(module, arguments, num_ranks, node=node, stop_s=stop_s)


def _run(module: str, arguments: Sequence[str], num_ranks: int, *, node: Node, stop_s: float) -> int:
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
                    # Ctrl-C on a terminal must reach only this process, which passes it on.
                    start_new_session=True,
                    # Orphans would keep training beside their successors, on the same ports.
                    preexec_fn=partial(die_with_parent, signal.SIGKILL, parent_pid=os.getpid()),
                )
            )
        if stops:
            _signal(ranks, signal.SIGTERM)  # The signal came while the ranks were being started.
        return _wait(ranks, lambda: stops[0] if stops else None)
    finally:
        _signal(ranks, signal.SIGKILL)
        for process in ranks:
            process.wait()
        for number, handler in former.items():
            signal.signal(number, handler)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Inside the block SIGTERM and SIGINT end the process: a rank waits for others outside Python, where no handler runs."""
    former = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _wait(ranks: Sequence[subprocess.Popen[bytes]], deadline: Callable[[], float | None]) -> int:
    """Wait until all have ended, or one has failed and the others' grace time is over."""
    failed, failed_at = 0, 0.0
    # Every process is polled, also those after a live one: ``returncode`` is known only after a poll.
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
    """Return whether the rank failed. One that ends by the signal while waiting for others did not."""
    return bool(process.returncode) and not (asked and process.returncode == -signal.SIGTERM)


def _status(returncode: int) -> int:
    """Return the status as a shell reports it: 128 + the signal for a process ended by a signal."""
    return 128 - returncode if returncode < 0 else returncode


def _signal(ranks: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in ranks:
        if process.poll() is None:
            process.send_signal(number)

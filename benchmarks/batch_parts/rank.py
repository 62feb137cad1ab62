"""One rank of a learner without a model: it takes one batch, packs what it would train, and compares every token.

``python -m benchmarks.batch_parts.rank CONFIG RAW_ENDPOINT`` with torchrun's variables. It prints one line of JSON.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import zmq
from prometheus_client import CollectorRegistry

from gspo.settings import Objective
from gspo_protocol.limits import MAX_VOCABULARY
from gspo_protocol.messages import BatchRequest, Resume
from gspo_services.learner.broker import Answer, AssembledBatch, BatchAnnounced, BrokerThread, Publication, assemble
from gspo_services.learner.metrics import LearnerMetrics
from gspo_services.learner.planned_batch import BatchSettings, plan_batch, rows_of_rank
from gspo_services.learner.profiling import NO_PROFILE
from gspo_services.learner.share import share
from gspo_services.learner.weights import copy_weights
from gspo_services.shared.runtime.clock import MonotonicClock
from gspo_services.shared.runtime.logs import configure_logging
from gspo_services.shared.runtime.telemetry import Health
from gspo_services.shared.settings import Settings, load_settings
from tests.support.broker.peers import tokens_of

POLL_S: Final = 1.0
TOKEN_BUDGET: Final = 65_536


class Ranks:
    """What an engine has besides its model."""

    max_tokens_per_micro_batch = TOKEN_BUDGET
    sequence_parallel = 1
    shares_beginnings = False
    max_sequence_tokens = None
    profile = NO_PROFILE

    def __init__(self) -> None:
        torch.distributed.init_process_group("gloo")
        self.rank, self.world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.clone()
        torch.distributed.all_reduce(total)
        return total

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0) -> torch.Tensor:
        received = tensor.clone()
        torch.distributed.broadcast(received, src=source)
        return received


def peak_bytes() -> int:
    """The largest resident set since ``reset_peak``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def reset_peak() -> int:
    """Begin to count anew; returns the resident set now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def take_batch(ranks: Ranks, broker: BrokerThread | None, settings: Settings) -> AssembledBatch:
    def next_arrival() -> Answer | None:
        while True:
            arrived, _ = share(ranks, None if broker is None else broker.take(POLL_S), False)
            if arrived is not None:
                return arrived

    def unwatched(_: int) -> AbstractContextManager[None]:
        return nullcontext()

    announced = next_arrival()
    assert isinstance(announced, BatchAnnounced), announced
    assembled = assemble(announced, partial(rows_of_rank, ranks, settings), next_arrival, unwatched)
    assert isinstance(assembled, AssembledBatch), assembled
    return assembled


def compared(ranks: Any, assembled: AssembledBatch, num_mini_batches: int) -> int:
    """Pack every micro-batch as for training, and compare its tokens with what the rollouts made; returns how many."""
    settings = BatchSettings(mini_batches=num_mini_batches)
    planned = plan_batch(ranks, assembled.groups, assembled.batch.policy_version, Objective(), settings)
    trajectories = [item.trajectory_id for item in assembled.batch.items]
    num_tokens = 0
    for packed in planned.micro_batches():
        if packed.is_empty:
            continue
        bounds = zip(packed.cu_seqlens, packed.cu_seqlens[1:], strict=False)
        for row, (start, end) in zip(packed.sequence_indices, bounds, strict=True):
            expected = tokens_of(trajectories[row], end - start)
            np.testing.assert_array_equal(packed.input_ids[0, start:end].numpy(), expected)
        num_tokens += packed.num_tokens
    return num_tokens


def raw_copy(ranks: Ranks, endpoint: str, num_bytes: int, own: Sequence[np.ndarray[Any, Any]]) -> float:
    """The same bytes from a bare socket to every rank, each of which keeps its share."""
    socket = zmq.Context.instance().socket(zmq.PULL)
    if ranks.rank == 0:
        socket.setsockopt(zmq.RCVHWM, 3)
        socket.connect(endpoint)
    begin, at = time.monotonic(), 0
    while at < num_bytes:
        size = torch.zeros(1, dtype=torch.int64)
        frame = b""
        if ranks.rank == 0:
            frame = socket.recv()
            size[0] = len(frame)
        size = ranks.broadcast(size)
        body = torch.empty(int(size[0]), dtype=torch.uint8)
        if ranks.rank == 0:
            body = torch.from_numpy(np.frombuffer(frame, np.uint8).copy())
        data = ranks.broadcast(body).numpy()
        share_of_rank = len(data) // ranks.world_size
        own[0][at // ranks.world_size :][:share_of_rank] = data[:share_of_rank]
        at += len(data)
    socket.close(linger=0)
    return time.monotonic() - begin


def main() -> None:
    settings = load_settings(Path(sys.argv[1]))
    configure_logging("learner")
    torch.set_num_threads(1)
    ranks, clock = Ranks(), MonotonicClock()
    with ExitStack() as stack:
        broker = None
        if ranks.rank == 0:
            metrics = LearnerMetrics(CollectorRegistry())
            thread = BrokerThread(settings, session="bench", clock=clock, health=Health(clock, 60.0), metrics=metrics)
            broker = stack.enter_context(thread)
            assert broker.wait_welcome(60.0) is not None
            broker.tell(Resume(next_batch=0))
            weights = copy_weights([("w", torch.zeros(1))])
            broker.publish(
                Publication(
                    policy_version=1,
                    weights=weights,
                    trained_batches=0,
                    vocabulary=MAX_VOCABULARY,
                    note_digest=lambda _: None,
                )
            )
            broker.wait_for_room()
            broker.flush(60.0)
        sys.stdout.write("published\n")
        sys.stdout.flush()
        sys.stdin.readline()  # until every group is complete
        ranks.sum_over_ranks(torch.zeros(1))
        base, cpu, begin = reset_peak(), cpu_s(), time.monotonic()
        if broker is not None:
            broker.tell(BatchRequest(index=0, policy_version=1))
        assembled = take_batch(ranks, broker, settings)
        seconds, cpu = time.monotonic() - begin, cpu_s() - cpu
        assembled_peak = peak_bytes() - base
        num_tokens = compared(ranks, assembled, settings.batch.mini_batches)
        peak = peak_bytes() - base
        num_bytes = 8 * assembled.batch.num_tokens
        del assembled
        raw_cpu = cpu_s()
        room = [np.empty(num_bytes // ranks.world_size + 1, np.uint8)]
        raw_s = raw_copy(ranks, sys.argv[2], num_bytes, room)
        raw_cpu = cpu_s() - raw_cpu
    line = {
        "rank": ranks.rank, "num_bytes": num_bytes, "num_tokens": num_tokens, "seconds": seconds, "cpu_s": cpu,
        "assembled_peak_bytes": assembled_peak, "peak_bytes": peak, "raw_s": raw_s, "raw_cpu_s": raw_cpu,
    }  # fmt: skip
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()
    torch.distributed.destroy_process_group()
    os._exit(0)  # Not after the threads of sockets that the other end has left.


if __name__ == "__main__":
    main()

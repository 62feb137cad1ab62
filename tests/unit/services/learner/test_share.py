"""Every rank trains on what rank 0 received."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from gspo_protocol.messages import Batch, BatchPart, EndOfRun
from gspo_services.learner.broker.port import BatchAnnounced, PartArrived
from gspo_services.learner.share import Directive, share
from tests.support.builders import a_batch, a_part, batch_arrays, part_arrays


class ThreadedRank:
    """One of several ranks that are threads; ``broadcast`` makes the checks of a collective."""

    def __init__(self, rank: int, mailboxes: list["queue.Queue[torch.Tensor]"], done: threading.Barrier) -> None:
        self.rank = rank
        self.world_size = len(mailboxes)
        self._mailboxes = mailboxes
        self._done = done
        self.num_broadcasts = 0

    def sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.rank == 0:
            total = tensor.clone()
            for _ in self._mailboxes[1:]:
                total += self._mailboxes[0].get(timeout=60)
        else:
            self._mailboxes[0].put(tensor.clone())
            total = torch.zeros_like(tensor)
        return self.broadcast(total)

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0) -> torch.Tensor:
        self.num_broadcasts += 1
        if self.rank == source:
            for rank, mailbox in enumerate(self._mailboxes):
                if rank != source:
                    mailbox.put(tensor.clone())
            received = tensor.clone()
        else:
            received = self._mailboxes[self.rank].get(timeout=60)
            assert (received.shape, received.dtype) == (tensor.shape, tensor.dtype)
        self._done.wait(timeout=60)
        return received


def shared(arrived: Directive, stop: bool, num_ranks: int = 3, asked: int = 0) -> list[tuple[Directive, bool]]:
    """The outcome on every rank. Only rank 0 knows what has arrived, and only rank ``asked`` whether to stop."""
    mailboxes: list[queue.Queue[torch.Tensor]] = [queue.Queue() for _ in range(num_ranks)]
    done = threading.Barrier(num_ranks)
    ranks = [ThreadedRank(rank, mailboxes, done) for rank in range(num_ranks)]
    with ThreadPoolExecutor(num_ranks) as threads:
        calls = [
            threads.submit(share, rank, arrived if rank.rank == 0 else None, stop and rank.rank == asked) for rank in ranks
        ]
        outcomes = [call.result(timeout=60) for call in calls]
    assert len({rank.num_broadcasts for rank in ranks}) == 1
    return outcomes


@pytest.mark.parametrize(
    "arrived",
    [BatchAnnounced(batch=a_batch(), arrays=batch_arrays()), PartArrived(part=a_part(), arrays=part_arrays())],
)
def test_a_batch_and_its_parts_reach_every_rank_with_their_arrays(arrived: BatchAnnounced | PartArrived) -> None:
    for directive, stop in shared(arrived, False):
        assert isinstance(directive, BatchAnnounced | PartArrived)
        assert not stop
        assert _message(directive) == _message(arrived)
        assert directive.arrays.keys() == arrived.arrays.keys()
        for name, array in arrived.arrays.items():
            np.testing.assert_array_equal(directive.arrays[name], array)


def _message(directive: BatchAnnounced | PartArrived) -> Batch | BatchPart:
    return directive.batch if isinstance(directive, BatchAnnounced) else directive.part


def test_the_end_of_the_run_reaches_every_rank() -> None:
    end = EndOfRun(index=60, reason="complete")
    assert shared(end, False) == [(end, False)] * 3


@pytest.mark.parametrize("asked", [0, 2])
def test_any_rank_that_is_asked_to_stop_stops_all_and_a_stop_wins_over_a_batch(asked: int) -> None:
    assert shared(None, True, asked=asked) == [(None, True)] * 3
    assert shared(BatchAnnounced(batch=a_batch(), arrays=batch_arrays()), True, asked=asked) == [(None, True)] * 3


def test_while_nothing_has_arrived_no_rank_has_anything_to_do() -> None:
    assert shared(None, False) == [(None, False)] * 3


def test_a_single_rank_needs_no_collective() -> None:
    rank = ThreadedRank(0, [queue.Queue()], threading.Barrier(1))
    arrived = BatchAnnounced(batch=a_batch(), arrays=batch_arrays())
    assert share(rank, arrived, False) == (arrived, False)
    assert rank.num_broadcasts == 0

"""A learner of several ranks without a model: their weight servers, and versions cut among them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise

import zmq.asyncio
from prometheus_client import CollectorRegistry

from gspo_services.learner.broker.port import Publication
from gspo_services.learner.broker.publisher import PartPublisher, Publisher
from gspo_services.learner.metrics import LearnerMetrics
from gspo_services.learner.weights.snapshot import Snapshot
from gspo_services.learner.weights.weight_copy import CopiedRange, WeightCopy, copy_weights
from gspo_services.shared.net import PLAINTEXT
from gspo_services.shared.runtime.clock import MonotonicClock
from gspo_services.shared.settings.sections import Learner, Settings
from tests.support.wire.served_weights import start, stepped
from tests.support.wire.snapshots import snapshot_of
from tests.support.wire.zmq_ends import ANY_PORT, zmq_context

Cut = Sequence[int]
"""Bytes of a version at which another rank's range begins, in turn: rank 0's comes first."""


def cut_copy(weights: WeightCopy, cuts: Cut, num_ranks: int) -> list[WeightCopy]:
    """The parts of each rank. Nobody has more than a range within one piece."""
    pieces: list[list[CopiedRange]] = [[] for _ in range(num_ranks)]
    for piece in weights.pieces:
        ends = [piece.begin, *(cut for cut in cuts if piece.begin < cut < piece.end), piece.end]
        for begin, end in pairwise(ends):
            rank = sum(cut <= begin for cut in cuts) % num_ranks
            pieces[rank].append(CopiedRange(begin, piece.data[begin - piece.begin : end - piece.begin]))
    return [WeightCopy(weights.layout, each) for each in pieces]


class SharedVersions:
    """Publishes step after step from the ranks' own servers."""

    def __init__(self, context: zmq.asyncio.Context, num_ranks: int, cuts: Cut) -> None:
        settings = Settings(learner=Learner(weights_endpoint=ANY_PORT))
        self.registries = [CollectorRegistry() for _ in range(num_ranks)]
        metrics = [LearnerMetrics(each) for each in self.registries]
        clock = MonotonicClock()
        self.first = Publisher(settings, context, security=PLAINTEXT, clock=clock, metrics=metrics[0])
        self.others = [
            PartPublisher(settings, context, security=PLAINTEXT, clock=clock, metrics=each, rank=rank)
            for rank, each in enumerate(metrics[1:], start=1)
        ]
        self.cuts = cuts
        self.tensors = start()
        self.version = 0

    @property
    def endpoint(self) -> str:
        return self.first.endpoint

    def begin(self, tasks: asyncio.TaskGroup, endpoints: Sequence[str] = ()) -> None:
        """``endpoints``: where the other ranks are said to be; none: where they are."""
        for each in (self.first, *self.others):
            each.start(tasks)
        self.first.know_ranks(endpoints or [each.endpoint for each in self.others])

    def close(self) -> None:
        for each in (self.first, *self.others):
            each.close()

    async def publish(self) -> Snapshot:
        """Returns the version as a learner of one rank would have it."""
        self.version += 1
        self.tensors = stepped(self.tensors, self.version)
        parts = cut_copy(copy_weights(self.tensors.items()), self.cuts, 1 + len(self.others))
        publications = [
            Publication(
                policy_version=self.version,
                weights=part,
                trained_batches=0,
                vocabulary=1,
                note_digest=lambda _: None,
                is_part=True,
            )
            for part in parts
        ]
        async with asyncio.TaskGroup() as tasks:
            for rank, publication in zip(self.others, publications[1:], strict=True):
                tasks.create_task(rank.serve_part(publication), name="part")
            published = tasks.create_task(self.first.serve(publications[0], 0.0), name="version")
        whole = snapshot_of(self.version, self.tensors.items())
        assert published.result().digest == whole.manifest.digest
        return whole

    def sent(self) -> list[float]:
        """The bytes that each rank has sent."""
        return [each.get_sample_value("gspo_learner_weight_bytes_sent_total") or 0.0 for each in self.registries]


@contextlib.asynccontextmanager
async def shared_learner(num_ranks: int, cuts: Cut, endpoints: Sequence[str] = ()) -> AsyncIterator[SharedVersions]:
    async with zmq_context() as context:
        learner = SharedVersions(context, num_ranks, cuts)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(_serve(learner, endpoints), name="ranks")
            yield learner
            running.cancel()


async def _serve(learner: SharedVersions, endpoints: Sequence[str]) -> None:
    try:
        async with asyncio.TaskGroup() as tasks:
            learner.begin(tasks, endpoints)
            await asyncio.Event().wait()
    finally:
        learner.close()

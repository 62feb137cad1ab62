"""Small real peers of the broker, without engines: a rollout that makes tokens up, a learner that trains nothing."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import numpy as np
import zmq.asyncio

from gspo_protocol.channels import BATCH, WORK
from gspo_protocol.messages import (
    Batch,
    BatchFailed,
    BatchPart,
    BatchPending,
    BatchRequest,
    Checkpointed,
    Chunk,
    EndOfRun,
    Finish,
    Heartbeat,
    Lease,
    LeaseEnded,
    LeaseKey,
    LeaseRequest,
    NoLease,
    Published,
    Pulse,
    Resume,
    Segment,
    SkipBatch,
    Trained,
    VersionRun,
    Welcome,
)
from gspo_services.learner.broker.parts import PartStream
from gspo_services.shared.net.peer import Delivered, PeerClient
from gspo_services.shared.net.security import PLAINTEXT, Security
from gspo_services.shared.runtime.clock import MonotonicClock

PROMPT_TOKENS = 3
VOCABULARY = 2**31 - 1
"""``tokens_of`` makes large token ids."""
REQUEST_TIMEOUT_S = 1.0


def tokens_of(trajectory_id: int, num_tokens: int) -> np.ndarray:
    """What the scripted rollout generates: a function of position alone, so that a resumed episode can be checked."""
    return (np.arange(num_tokens, dtype=np.int32) * 7 + trajectory_id * 1000).astype(np.int32)


def logprobs_of(trajectory_id: int, num_tokens: int) -> np.ndarray:
    return (-(np.arange(num_tokens, dtype=np.float32) + trajectory_id % 13) / 1024).astype(np.float32)


def experts_of(token_ids: np.ndarray) -> np.ndarray:
    """What the scripted rollout's engine reports: of two layers, one expert."""
    return np.stack([token_ids % 250, token_ids % 241], axis=1).astype(np.uint8)[:, :, None, None]


@contextlib.asynccontextmanager
async def running(peer: PeerClient) -> AsyncIterator[PeerClient]:
    """Keep a peer connected for the duration of the block."""
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(peer.run())
        try:
            yield peer
        finally:
            task.cancel()


@dataclass
class ScriptedRollout:
    """Extends every lease in chunks of 4 tokens up to 3 prompt and ``action_tokens`` action tokens, then finishes it."""

    context: zmq.asyncio.Context
    endpoint: str
    name: str
    session: str
    capacity: int = 4
    action_tokens: int = 13
    chunk_delay_s: float = 0.0
    policy_version: int = 0
    with_experts: bool = False
    security: Security = PLAINTEXT
    seen_leases: list[Lease] = field(default_factory=list)
    handshakes: int = 0
    finished: int = 0
    chunks: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """Trajectory, offset and tokens of each chunk, under its sequence number."""
    stopping: bool = False

    def __post_init__(self) -> None:
        self.clock = MonotonicClock()
        self.peer = PeerClient(
            self.context,
            WORK,
            self.endpoint,
            role="rollout",
            peer=self.name,
            session=self.session,
            clock=self.clock,
            security=self.security,
        )
        self.episodes_under_way: set[asyncio.Task[None]] = set()
        self._held: dict[int, int] = {}
        self._due = 0  # leases of the last request that are still to come
        self._asked_at = 0.0
        self._requests = 0

    @property
    def num_acknowledged(self) -> int:
        """Chunks and Finishes that the broker acknowledged."""
        return len(self.chunks) + self.finished - self.peer.num_unacknowledged

    @property
    def acknowledged(self) -> list[tuple[int, int, int]]:
        """Chunks that the broker has acknowledged."""
        return [chunk for seq, chunk in self.chunks.items() if seq < self.peer.num_acknowledged]

    async def run(self) -> None:
        """Until cancelled, or until the broker says that the run is over."""
        async with running(self.peer):
            await self.peer.connected_welcome()
            async with asyncio.TaskGroup() as tasks:
                beat = tasks.create_task(self._heartbeat())
                while not self.stopping:
                    delivered = await self._next()
                    if delivered is not None:
                        self._take(delivered, tasks)
                    room = self.capacity - len(self._held)
                    # A request or its leases may be lost with a connection.
                    waiting = self._due and self.clock.now() - self._asked_at < REQUEST_TIMEOUT_S
                    if room > 0 and not waiting and self.policy_version > 0:
                        self._due, self._asked_at = room, self.clock.now()
                        self._requests += 1
                        request = LeaseRequest(request_id=self._requests, capacity=room, policy_version=self.policy_version)
                        await self.peer.send(request)
                beat.cancel()
                for episode in self.episodes_under_way:
                    episode.cancel()

    def be_killed(self) -> None:
        """From now on it ends without a Goodbye."""
        self.peer._welcomed.clear()

    async def _next(self) -> Delivered | None:
        try:
            async with asyncio.timeout(0.1):
                return await self.peer.inbox.get()
        except TimeoutError:
            return None

    def _take(self, delivered: Delivered, tasks: asyncio.TaskGroup) -> None:
        match delivered.message:
            case Lease() as lease:
                self._due = max(0, self._due - 1)
                self.seen_leases.append(lease)
                assert list(delivered.arrays["token_ids"]) == list(tokens_of(lease.trajectory_id, lease.num_tokens))
                self._held[lease.trajectory_id] = lease.epoch
                task = tasks.create_task(self._episode(lease))
                self.episodes_under_way.add(task)
                task.add_done_callback(self.episodes_under_way.discard)
            case NoLease():
                self._due = 0
            case LeaseEnded(trajectory_id=trajectory_id, epoch=epoch):
                if self._held.get(trajectory_id) == epoch:
                    del self._held[trajectory_id]
            case Pulse(policy_version=version, stopping=stopping):
                self.policy_version = version
                self.stopping = stopping
            case Welcome(policy_version=version):
                self.handshakes += 1
                self._due = 0
                self.policy_version = version

    async def _heartbeat(self) -> None:
        while True:
            leases = [LeaseKey(trajectory_id, epoch) for trajectory_id, epoch in self._held.items()]
            await self.peer.send(Heartbeat(policy_version=self.policy_version, status="serving", leases=leases))
            await asyncio.sleep(0.05)

    async def _episode(self, lease: Lease) -> None:
        length = PROMPT_TOKENS + self.action_tokens
        token_ids, logprobs = tokens_of(lease.trajectory_id, length), logprobs_of(lease.trajectory_id, length)
        offset = lease.num_tokens
        while offset < length:
            if self._held.get(lease.trajectory_id) != lease.epoch:
                return
            end = PROMPT_TOKENS if offset < PROMPT_TOKENS else min(length, offset + 4)
            kind, version = ("observation", -1) if offset < PROMPT_TOKENS else ("action", self.policy_version)
            chunk = Chunk(
                trajectory_id=lease.trajectory_id,
                epoch=lease.epoch,
                offset=offset,
                num_tokens=end - offset,
                segments=[Segment(kind, 0, end - offset)],
                version_runs=[VersionRun(version, end - offset)],
                state={"at": end},
                turn_done=end == length,
            )
            arrays = {"token_ids": token_ids[offset:end], "logprobs": logprobs[offset:end]}
            if self.with_experts and kind == "action":
                arrays["experts"] = experts_of(token_ids[offset:end])
            await self.peer.send(chunk, arrays)
            # Nothing was pushed since: this is the number of the message before.
            self.chunks[self.peer._outbox.next_seq - 1] = (chunk.trajectory_id, chunk.offset, chunk.num_tokens)
            offset = end
            if self.chunk_delay_s:
                await asyncio.sleep(self.chunk_delay_s)
        reward = float(lease.seed % 2)
        finish = Finish(
            trajectory_id=lease.trajectory_id, epoch=lease.epoch, num_tokens=length, reason="done", turn_rewards=[reward]
        )
        await self.peer.send(finish)
        if self._held.pop(lease.trajectory_id, None) is not None:
            self.finished += 1


@dataclass
class ScriptedLearner:
    """Publishes, asks for batches in order, reports each as trained; ``batches`` holds what was delivered.

    It ends at a batch of ``poison``, and reports that first.
    """

    context: zmq.asyncio.Context
    endpoint: str
    session: str
    resume_at: int = 0
    checkpoint_every: int = 2
    name: str = "learner"
    train_s: float = 0.0
    security: Security = PLAINTEXT
    poison: frozenset[int] = frozenset()
    batches: list[tuple[Batch, list[int]]] = field(default_factory=list)
    experts: list[np.ndarray | None] = field(default_factory=list)
    """Of each part."""
    num_parts: int = 0
    """Parts of batches that it has taken."""
    skipped: list[SkipBatch] = field(default_factory=list)
    pending: list[BatchPending] = field(default_factory=list)
    end: EndOfRun | None = None
    stop_after: Callable[[int], bool] = field(default=lambda index: False)

    def __post_init__(self) -> None:
        self.peer = PeerClient(
            self.context,
            BATCH,
            self.endpoint,
            role="learner",
            peer=self.name,
            session=self.session,
            clock=MonotonicClock(),
            security=self.security,
        )

    async def run(self) -> None:
        """Until the end of the run, or ``stop_after(index)``."""
        async with running(self.peer):
            welcome = await self.peer.connected_welcome()
            index, known = self.resume_at, welcome.trained_batches
            # As the learner does: behind the newest version it first walks through the numbers that are known already.
            version = welcome.policy_version - (known - index) if index < known else welcome.policy_version + 1
            await self.peer.send(Resume(next_batch=index))
            if index >= known:
                await self._publish(version, index)
            while True:
                batch = await self._batch(index, version)
                if batch is None:
                    break
                is_skipped = isinstance(batch, SkipBatch)
                if index in self.poison and not is_skipped:
                    await self.peer.send(BatchFailed(index=index, reason="the loss is nan", raised=True))
                    break
                await asyncio.sleep(self.train_s)
                # As the learner does: first the version that the batch made, then the report that names it.
                index, version = index + 1, version + 1
                if index >= known:
                    await self._publish(version, index)
                metrics: dict[str, float | None] = {} if is_skipped else {"loss": 0.5}
                report = Trained(index=index - 1, policy_version=version, metrics=metrics, skipped=is_skipped)
                await self.peer.send(report)
                if index % self.checkpoint_every == 0:
                    await self.peer.send(Checkpointed(next_batch=index, policy_version=version))
                if self.stop_after(index):
                    break
            await self.peer.flushed()

    async def took_part(self, part: int) -> None:
        """Called for each part of a batch; does nothing here."""

    async def _publish(self, version: int, trained_batches: int) -> None:
        await self.peer.send(
            Published(
                policy_version=version,
                endpoint="tcp://127.0.0.1:1",
                digest="d-2",
                num_bytes=1,
                trained_batches=trained_batches,
                vocabulary=VOCABULARY,
            )
        )

    async def _batch(self, index: int, version: int) -> Batch | SkipBatch | None:
        announced, parts, tokens = None, None, list[int]()
        while True:
            asked = BatchRequest(index=index, policy_version=version) if parts is None else parts.request()
            if asked is not None:
                await self.peer.send(asked)
            try:
                async with asyncio.timeout(1.0):
                    while True:
                        delivered = await self.peer.inbox.get()
                        match delivered.message:
                            case Batch() as batch if batch.index == index and parts is None:
                                announced, parts = batch, PartStream(batch)
                            case BatchPart() as part if parts is not None and parts.offer(part, delivered.arrays):
                                tokens += delivered.arrays["token_ids"].tolist()
                                self.experts.append(delivered.arrays.get("experts"))
                                parts.took()
                                self.num_parts += 1
                                await self.took_part(part.part)
                                if parts.complete and announced is not None:
                                    self.batches.append((announced, tokens))
                                    return announced
                            case SkipBatch() as skipped if skipped.index == index:
                                self.skipped.append(skipped)
                                return skipped
                            case BatchPending() as pending:
                                self.pending.append(pending)
                            case EndOfRun() as end:
                                self.end = end
                                return None
                        if parts is not None and (request := parts.request()) is not None:
                            await self.peer.send(request)
            except TimeoutError:
                if parts is not None:
                    parts.ask_again()
                continue

"""A rollout without an engine: a real connection that sends chunks as fast as they are acknowledged.

    python -m benchmarks.broker_intake.producer ENDPOINT NAME CHUNK_TOKENS gathered|alone|ready [KEYS]

``alone``: each chunk in a message of its own. ``ready``: the messages are made
beforehand, so that the broker is what limits the rate; each has one chunk of each of many trajectories, because episodes
that go on at an engine's pace seldom have two ready at once.

A request {"prepare": N} is answered when N chunks are ready, where they are made beforehand. Each request
{"chunks": N, "under_way": U} is answered when N more chunks are acknowledged, of which at most U (0: the channel's window)
were in flight at a time.
"""

import asyncio
import contextlib
import json
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import zmq.asyncio

from benchmarks.broker_intake.load import CHUNKS_PER_TRAJECTORY, LEASES, a_chunk, arrays_of
from gspo_protocol.channels import WORK
from gspo_protocol.codec import Array
from gspo_protocol.limits import MAX_CHUNKS_PER_MESSAGE, MAX_GATHERED_TOKENS
from gspo_protocol.messages import Finish, Heartbeat, Lease, LeaseKey, LeaseRequest, Message, NoLease, Pulse
from gspo_protocol.messages.gathered import gather
from gspo_services.rollout.gathering import GatheringClient
from gspo_services.shared.net import PLAINTEXT, PeerClient, Security
from gspo_services.shared.runtime.clock import MonotonicClock
from gspo_services.shared.runtime.logs import configure_logging
from gspo_services.shared.settings import SecuritySection
from tests.support.broker.peers import running

HEARTBEAT_S = 1.0


@dataclass
class Held:
    """A trajectory that this producer extends."""

    trajectory_id: int
    epoch: int
    num_tokens: int = 0


class Producer:
    """Extends its trajectories in turn, finishes them at full length, and asks for new ones."""

    def __init__(self, peer: PeerClient, chunk_tokens: int) -> None:
        self._peer = peer
        self._chunk_tokens = chunk_tokens
        self._clock = MonotonicClock()
        self._arrays = arrays_of(chunk_tokens)
        self._held: deque[Held] = deque()
        self._requests = 0
        self._version = 0
        self._sent: deque[float] = deque()
        self._latencies: list[float] = []

    async def produce(self, num_chunks: int, under_way: int) -> list[float]:
        """Send, wait for all acknowledgements, and return the seconds from each message to its acknowledgement."""
        self._latencies = []
        for _ in range(num_chunks):
            if not self._held:
                await self._refill()
            held = self._held.popleft()
            chunk = a_chunk(held.trajectory_id, held.epoch, held.num_tokens, self._chunk_tokens)
            held.num_tokens += self._chunk_tokens
            await self._send(chunk, under_way)
            if held.num_tokens < CHUNKS_PER_TRAJECTORY * self._chunk_tokens:
                self._held.append(held)
                continue
            await self._send(
                Finish(
                    trajectory_id=held.trajectory_id,
                    epoch=held.epoch,
                    num_tokens=held.num_tokens,
                    reason="length",
                    turn_rewards=[1.0],
                ),
                under_way,
            )
        await self._peer.flushed()
        self._settle()
        return self._latencies

    async def prepare(self, num_chunks: int) -> None:
        """Make what can be made before the clock runs: nothing."""

    async def _send(self, message: Message, under_way: int) -> None:
        await self._leave(message, self._arrays if message.ARRAYS else None, under_way)

    async def _leave(self, message: Message, arrays: Mapping[str, Array] | None, under_way: int) -> None:
        self._sent.append(self._clock.now())
        await self._peer.send(message, arrays)
        if under_way and len(self._sent) >= under_way:
            await self._peer.flushed()
        self._settle()

    def _settle(self) -> None:
        now = self._clock.now()
        while len(self._sent) > self._peer.num_unacknowledged:
            self._latencies.append(now - self._sent.popleft())

    async def _refill(self) -> None:
        while not self._version:
            await self._next()
        self._requests += 1
        request = LeaseRequest(request_id=self._requests, capacity=LEASES, policy_version=self._version)
        await self._peer.send(request)
        most = len(self._held) + LEASES
        while len(self._held) < most:
            message = await self._next()
            if isinstance(message, Lease):
                self._held.append(Held(message.trajectory_id, message.epoch))
            elif isinstance(message, NoLease):
                raise RuntimeError(f"no lease ({message.reason}): the benchmark's run is too short for so many chunks")

    async def _next(self) -> Message:
        message: Message = (await self._peer.inbox.get()).message
        if isinstance(message, Pulse):
            self._version = message.policy_version
        return message

    async def heartbeat(self) -> None:
        """Keep the leases alive until cancelled."""
        while True:
            leases = [LeaseKey(held.trajectory_id, held.epoch) for held in self._held]
            await self._peer.send(Heartbeat(policy_version=self._version, status="serving", leases=leases))
            await asyncio.sleep(HEARTBEAT_S)


class ReadyProducer(Producer):
    """Sends whole trajectories, whose messages were made beforehand."""

    def __init__(self, peer: PeerClient, chunk_tokens: int) -> None:
        super().__init__(peer, chunk_tokens)
        self._ready: list[tuple[Message, Mapping[str, Array] | None]] = []

    async def prepare(self, num_chunks: int) -> None:
        """Make the messages of ``num_chunks`` chunks. Raises: ValueError when these are no whole trajectories."""
        number, rest = divmod(num_chunks, CHUNKS_PER_TRAJECTORY)
        if rest:
            raise ValueError(f"{num_chunks} chunks are no whole trajectories of {CHUNKS_PER_TRAJECTORY}")
        while len(self._held) < number:
            await self._refill()
        length = CHUNKS_PER_TRAJECTORY * self._chunk_tokens
        most = min(MAX_CHUNKS_PER_MESSAGE, MAX_GATHERED_TOKENS // self._chunk_tokens)
        for first in range(0, number, most):
            together = [self._held[place] for place in range(first, min(first + most, number))]
            for offset in range(0, length, self._chunk_tokens):
                chunks = [a_chunk(each.trajectory_id, each.epoch, offset, self._chunk_tokens) for each in together]
                self._ready.append(gather([(chunk, self._arrays) for chunk in chunks]))
            for each in together:
                ids = {"trajectory_id": each.trajectory_id, "epoch": each.epoch}
                self._ready.append((Finish(**ids, num_tokens=length, reason="length", turn_rewards=[1.0]), None))

    async def produce(self, num_chunks: int, under_way: int) -> list[float]:
        """Send what is ready; see ``Producer.produce``."""
        self._latencies = []
        for message, arrays in self._ready:
            await self._leave(message, arrays, under_way)
            if isinstance(message, Finish):
                self._held.popleft()  # In the order in which they were made.
        await self._peer.flushed()
        self._settle()
        self._ready.clear()
        return self._latencies


async def serve(endpoint: str, name: str, chunk_tokens: int, kind: str, security: Security) -> None:
    context = zmq.asyncio.Context()
    clock = MonotonicClock()
    client = GatheringClient if kind == "gathered" else PeerClient
    peer = client(context, WORK, endpoint, role="rollout", peer=name, session="s", clock=clock, security=security)
    loop = asyncio.get_running_loop()
    try:
        async with running(peer), asyncio.TaskGroup() as tasks:
            producer = (ReadyProducer if kind == "ready" else Producer)(peer, chunk_tokens)
            await peer.connected_welcome()
            beating = tasks.create_task(producer.heartbeat(), name="heartbeat")
            while line := await loop.run_in_executor(None, sys.stdin.readline):
                request = json.loads(line)
                if "prepare" in request:
                    await producer.prepare(request["prepare"])
                    print(json.dumps({}), flush=True)
                    continue
                begin = clock.now()
                latencies = await producer.produce(request["chunks"], request["under_way"])
                print(json.dumps({"seconds": clock.now() - begin, "latencies_s": latencies}), flush=True)
            beating.cancel()
    finally:
        peer.close()
        context.destroy(linger=0)


def main() -> None:
    endpoint, name, chunk_tokens, kind, *keys = sys.argv[1:]
    configure_logging("producer")
    security = Security.load(SecuritySection(keys=keys[0]), "rollout") if keys else PLAINTEXT
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(endpoint, name, int(chunk_tokens), kind, security))


if __name__ == "__main__":
    main()

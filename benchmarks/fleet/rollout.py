"""A rollout without an engine: a real connection, real leases and heartbeats, chunks gathered as rollouts gather them."""

import asyncio
import random
from collections import deque
from dataclasses import dataclass, field

import zmq.asyncio

from benchmarks.broker_intake.load import a_chunk, arrays_of
from benchmarks.fleet.load import Load, num_chunks_of
from gspo_protocol.channels import WORK
from gspo_protocol.messages import (
    Ack,
    Chunk,
    Finish,
    Heartbeat,
    Lease,
    LeaseEnded,
    LeaseKey,
    LeaseRequest,
    Message,
    NoLease,
    Pulse,
    Welcome,
)
from gspo_services.rollout.broker import HEARTBEAT_S
from gspo_services.rollout.gathering import GatheringClient
from gspo_services.shared.runtime.clock import Clock

STEP_S = 0.25
"""Chunks of this long are ready together, as those of one decoding step are."""
REQUEST_TIMEOUT_S = 2.0


@dataclass
class Played:
    """An episode that this rollout extends."""

    trajectory_id: int
    epoch: int
    num_tokens: int


@dataclass
class FleetFigures:
    """What the rollouts of one process have seen. Times are in seconds."""

    chunks: int = 0
    """Acknowledged."""
    leases: int = 0
    no_leases: int = 0
    ended: int = 0
    """Leases that the broker ended."""
    ack_s: list[float] = field(default_factory=list)
    lease_s: list[float] = field(default_factory=list)
    """From a request to each lease that answers it."""


class TimedClient(GatheringClient):
    """Knows when each message of an episode was acknowledged."""

    def watch(self, rollout: "FakeRollout") -> None:
        """Tell ``rollout`` of each acknowledgement."""
        self._rollout = rollout

    async def _on_ack(self, ack: Ack) -> None:
        await super()._on_ack(ack)
        self._rollout.settle()


class FakeRollout:
    """One rollout of the fleet, under a name and a session of its own."""

    def __init__(
        self, context: zmq.asyncio.Context, endpoint: str, name: str, clock: Clock, load: Load, figures: FleetFigures
    ) -> None:
        self.name = name
        self.acknowledged: dict[int, tuple[int, int]] = {}
        """By trajectory: under which epoch the broker acknowledged how many tokens. One whose lease it ended is not here."""
        self.working_since = 0.0
        """When something that was sent after ``watch_from`` was first acknowledged; 0: not yet."""
        self._watch_from = float("inf")
        self._handshakes_before = 0
        self._clock, self._load, self._figures = clock, load, figures
        self._arrays = arrays_of(load.chunk_tokens)
        self._random = random.Random(name)
        self._phase = self._random.random()
        """When in each second it beats, and in each step it sends: a fleet does not do so at once."""
        self._playing: list[Played] = []
        self._ended: set[tuple[int, int]] = set()
        self._under_way: deque[tuple[float, int, int, int]] = deque()
        """Of each message that is not acknowledged: when it was sent, trajectory and epoch, the tokens that it then has."""
        self._version = 0
        self._asked_at, self._due, self._requests, self._ask_again_at = 0.0, 0, 0, 0.0
        self.peer = TimedClient(context, WORK, endpoint, role="rollout", peer=name, session=f"s-{name}", clock=clock)
        self.peer.watch(self)

    async def run(self) -> None:
        """Until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.peer.run(), name="peer")
                await self.peer.connected_welcome()
                tasks.create_task(self._listen(), name="listen")
                tasks.create_task(self._beat(), name="beat")
                tasks.create_task(self._play(), name="play")
        finally:
            self.peer.close()

    def be_killed(self) -> None:
        """From now on it ends without a Goodbye, as after kill -9."""
        self.peer._welcomed.clear()

    def watch_from(self, now: float) -> None:
        """The broker is about to be killed: notice when this rollout works again."""
        self._handshakes_before, self._watch_from, self.working_since = self.peer.num_handshakes, now, 0.0

    def settle(self) -> None:
        """Note what is acknowledged by now."""
        now = self._clock.now()
        while len(self._under_way) > self.peer.num_unacknowledged:
            sent_at, trajectory_id, epoch, num_tokens = self._under_way.popleft()
            self._figures.ack_s.append(now - sent_at)
            if num_tokens:
                self._figures.chunks += 1
                # What comes after the end of a lease is acknowledged too, and not taken.
                if (trajectory_id, epoch) not in self._ended:
                    self.acknowledged[trajectory_id] = (epoch, num_tokens)
            if sent_at >= self._watch_from and not self.working_since and self.peer.num_handshakes > self._handshakes_before:
                self.working_since = now

    async def _listen(self) -> None:
        while True:
            delivered = await self.peer.inbox.get()
            match delivered.message:
                case Lease() as lease:
                    self._due -= 1
                    self._figures.leases += 1
                    self._figures.lease_s.append(self._clock.now() - self._asked_at)
                    self._playing.append(Played(lease.trajectory_id, lease.epoch, lease.num_tokens))
                case NoLease() as answer:
                    self._due = 0
                    self._figures.no_leases += 1
                    self._ask_again_at = self._clock.now() + answer.retry_s
                case LeaseEnded() as ended:
                    self._figures.ended += 1
                    self._ended.add((ended.trajectory_id, ended.epoch))
                    self.acknowledged.pop(ended.trajectory_id, None)
                case Pulse(policy_version=version):
                    self._version = version
                case Welcome(policy_version=version):
                    self._version, self._due = version, 0
                    await self._say_serving()

    async def _beat(self) -> None:
        await asyncio.sleep(self._phase * HEARTBEAT_S)
        while True:
            await self._say_serving()
            await asyncio.sleep(HEARTBEAT_S)

    async def _say_serving(self) -> None:
        leases = [LeaseKey(each.trajectory_id, each.epoch) for each in self._playing]
        await self.peer.send(Heartbeat(policy_version=self._version, status="serving", leases=leases))

    async def _play(self) -> None:
        await asyncio.sleep(self._phase * STEP_S)
        ready = self._phase
        while True:
            await self._ask()
            ready += self._load.pace * STEP_S if self._load.pace else self._load.episodes
            while ready >= 1 and self._playing:
                ready -= 1
                await self._extend(self._playing.pop(self._random.randrange(len(self._playing))))
            ready = min(ready, 1.0)
            if self._load.pace or not self._playing:
                await asyncio.sleep(STEP_S)

    async def _ask(self) -> None:
        now = self._clock.now()
        room = self._load.episodes - len(self._playing)
        is_waiting = self._due > 0 and now - self._asked_at < REQUEST_TIMEOUT_S
        if room <= 0 or is_waiting or now < self._ask_again_at or not self._version:
            return
        self._requests += 1
        self._asked_at, self._due = now, room
        await self.peer.send(LeaseRequest(request_id=self._requests, capacity=room, policy_version=self._version))

    async def _extend(self, episode: Played) -> None:
        if (episode.trajectory_id, episode.epoch) in self._ended:
            return
        ids = (episode.trajectory_id, episode.epoch)
        length = num_chunks_of(episode.trajectory_id) * self._load.chunk_tokens
        if episode.num_tokens < length:  # Otherwise only the Finish of its former holder was lost.
            chunk: Chunk = a_chunk(*ids, episode.num_tokens, self._load.chunk_tokens, version=self._version)
            episode.num_tokens += self._load.chunk_tokens
            await self._send(chunk, *ids, episode.num_tokens)
        if episode.num_tokens < length:
            self._playing.append(episode)
            return
        finish = Finish(
            trajectory_id=ids[0],
            epoch=ids[1],
            num_tokens=episode.num_tokens,
            reason="length",
            turn_rewards=[float(ids[0] % 2)],
        )
        await self._send(finish, *ids, 0)
        await self._ask()

    async def _send(self, message: Message, trajectory_id: int, epoch: int, num_tokens: int) -> None:
        began = self._clock.now()
        await self.peer.send(message, self._arrays if message.ARRAYS else None)
        self._under_way.append((began, trajectory_id, epoch, num_tokens))
        self.settle()

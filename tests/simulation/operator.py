"""An operator in virtual time, ``gspo release RUN_DIR all``, and a hostile peer that the broker admits."""

import asyncio
from typing import Any

import numpy as np

from protocol.channels import BATCH, WORK, ChannelSpec
from protocol.limits import PROTOCOL_VERSION
from protocol.messages import (
    Chunk,
    Goodbye,
    Heartbeat,
    Hello,
    Lease,
    LeaseRequest,
    Message,
    Refused,
    ReleaseRequest,
    Role,
    Segment,
    VersionRun,
    Welcome,
)
from services.runtime.net.channel import DealerChannel
from services.runtime.net.peer import PeerClient
from services.runtime.settings.fingerprint import run_fingerprint
from tests.simulation.loop import Process
from tests.simulation.network import SimContext
from tests.simulation.processes import Machinery

OPERATOR = "operator"
ASKS = 3
HOSTILE = "hostile"
"""Every name of the hostile peer begins so; the audit of honest peers leaves it out."""
HOSTILE_S = 20.0
CROWD = 12
MAX_HOSTILE_LEASES = 24
"""More than its quota allows under one broker, however short the honest rollouts' lives are."""
IDENTITY = "a session keeps its role"
PLACES = "an operator always gets in"
QUOTA = "a liar is limited"


class OperatorProcess:
    """Asks the broker several times, as a request may be lost."""

    def __init__(self, machinery: Machinery, process: Process) -> None:
        self._machinery = machinery
        self._process = process

    async def run(self, stop: asyncio.Event) -> None:
        settings = self._machinery.settings
        context: Any = SimContext(self._machinery.network, self._process)
        client = PeerClient(
            context,
            BATCH,
            settings.broker.batch_endpoint,
            role="operator",
            peer=self._process.name,
            session=self._process.session,
            clock=self._machinery.clock,
            fingerprint=run_fingerprint(settings),
        )
        try:
            async with client.running(OPERATOR):
                for _ in range(ASKS):
                    if stop.is_set():
                        break
                    await client.send(ReleaseRequest(batches=[]))
                    await asyncio.sleep(1.0)
        finally:
            context.destroy()

    def check_bounds(self) -> None:
        """It keeps nothing."""


class HostileProcess:
    """For HOSTILE_S it takes the learner's session, says Goodbye under a rollout's name, answers leases with lies, and opens
    as many sessions as it can.
    """

    def __init__(self, machinery: Machinery, process: Process) -> None:
        self._machinery = machinery
        self._process = process
        self._num_leases = 0

    async def run(self, stop: asyncio.Event) -> None:
        context: Any = SimContext(self._machinery.network, self._process)
        try:
            async with asyncio.timeout(HOSTILE_S), asyncio.TaskGroup() as tasks:
                for attack in (self._steal, self._leave, self._lie, self._crowd):
                    tasks.create_task(attack(context))
        except TimeoutError:
            self._machinery.audit.happened["hostile peer"] += 1
        finally:
            context.destroy()

    def check_bounds(self) -> None:
        """It keeps no rules."""

    def _link(self, context: Any, spec: ChannelSpec, name: str) -> "_Link":
        broker = self._machinery.settings.broker
        endpoint = broker.work_endpoint if spec is WORK else broker.batch_endpoint
        session = f"{name}.{self._process.life}"
        return _Link(DealerChannel(context, spec, endpoint, f"{name}/{session}"), name, session)

    async def _steal(self, context: Any) -> None:
        """The learner's session has become known, and an operator says Hello with it."""
        audit, link = self._machinery.audit, self._link(context, BATCH, f"{HOSTILE}-thief")
        while True:
            holder = audit.holder
            if holder is not None:
                answer = await link.hello("operator", "learner", holder)
                taken = isinstance(answer, Welcome) and audit.holder == holder
                audit.require(not taken, IDENTITY, lambda: "an operator is welcomed with the learner's session")
            await asyncio.sleep(1.0)

    async def _leave(self, context: Any) -> None:
        link = self._link(context, BATCH, f"{HOSTILE}-namesake")
        while True:
            if isinstance(await link.hello("operator", "rollout-0", link.session), Welcome):
                await link.channel.send(Goodbye())
            await asyncio.sleep(1.0)

    async def _lie(self, context: Any) -> None:
        """Each lease is answered with a chunk that does not follow what the broker has."""
        link, seq = self._link(context, WORK, f"{HOSTILE}-liar"), 0
        while True:
            welcome = await link.hello("rollout", link.name, link.session, seq)
            while isinstance(welcome, Welcome):
                version = self._machinery.audit.durable.newest_version
                await link.channel.send(Heartbeat(policy_version=version, status="serving", leases=[]))
                answer = await link.ask(LeaseRequest(request_id=1, capacity=1, policy_version=version))
                if isinstance(answer, Lease):
                    self._num_leases += 1
                    self._machinery.audit.require(
                        self._num_leases <= MAX_HOSTILE_LEASES, QUOTA, lambda: f"it got {self._num_leases} leases"
                    )
                    await link.channel.send(_lie(answer, max(1, version)), _TOKENS, seq)
                    seq += 1
                elif isinstance(answer, Refused) and answer.message_type in ("hello", "lease_request"):
                    break
                await asyncio.sleep(0.05)
            await asyncio.sleep(1.0)

    async def _crowd(self, context: Any) -> None:
        links = [self._link(context, WORK, f"{HOSTILE}-crowd-{number}") for number in range(CROWD)]
        watcher = self._link(context, BATCH, f"{HOSTILE}-watcher")
        await asyncio.sleep(1.0)  # The liar finds a place.
        while True:
            for link in links:
                await link.channel.send(link.greeting("rollout", link.name, link.session))
            answer = await watcher.hello("operator", watcher.name, watcher.session)
            refused = isinstance(answer, Refused) and answer.message_type == "hello"
            self._machinery.audit.require(not refused, PLACES, lambda: "it was refused")
            await watcher.channel.send(Goodbye())
            await asyncio.sleep(1.0)


_TOKENS = {"token_ids": np.array([1], dtype="<i4"), "logprobs": np.array([-1.0], dtype="<f4")}


def _lie(lease: Lease, version: int) -> Chunk:
    return Chunk(
        trajectory_id=lease.trajectory_id,
        epoch=lease.epoch,
        offset=lease.num_tokens + 7,
        num_tokens=1,
        segments=[Segment("action", 0, 1)],
        version_runs=[VersionRun(version, 1)],
    )


class _Link:
    """A bare connection."""

    def __init__(self, channel: DealerChannel, name: str, session: str) -> None:
        self.channel = channel
        self.name = name
        self.session = session

    def greeting(self, role: Role, peer: str, session: str, seq: int = 0) -> Hello:
        return Hello(protocol_version=PROTOCOL_VERSION, role=role, peer=peer, session=session, first_seq=seq)

    async def hello(self, role: Role, peer: str, session: str, seq: int = 0) -> Message | None:
        return await self.ask(self.greeting(role, peer, session, seq), Welcome, Refused)

    async def ask(self, message: Message, *kinds: type[Message]) -> Message | None:
        """The next answer (of one of ``kinds``); None: there is none within 2 s."""
        await self.channel.send(message)
        try:
            async with asyncio.timeout(2.0):
                while True:
                    received = (await self.channel.receive()).received
                    if received is not None and (not kinds or isinstance(received.message, kinds)):
                        return received.message
        except TimeoutError:
            return None

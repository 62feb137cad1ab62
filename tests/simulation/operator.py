"""An operator in virtual time, ``gspo requeue RUN_DIR all`` and a stop, and a hostile peer that the broker admits."""

import asyncio
import itertools
from collections import defaultdict
from typing import Any

import numpy as np

from gspo_protocol.channels import BATCH, WORK, ChannelSpec
from gspo_protocol.limits import PROTOCOL_VERSION
from gspo_protocol.messages import (
    Chunk,
    Goodbye,
    Heartbeat,
    Hello,
    Lease,
    LeaseRequest,
    Message,
    NoLease,
    Refused,
    RequeueRequest,
    Role,
    Segment,
    StopRequest,
    VersionRun,
    Welcome,
)
from gspo_services.shared.net.channel import DealerChannel
from gspo_services.shared.net.peer import PeerClient
from gspo_services.shared.settings.fingerprint import run_fingerprint
from tests.simulation.loop import Process
from tests.simulation.network import SimContext
from tests.simulation.processes.machinery import Machinery

OPERATOR = "operator"
STOPPER = "operator-stops"
ASKS = 3
HOSTILE = "hostile"
"""Every name of the hostile peer begins so; the audit of honest peers leaves it out."""
HOSTILE_S = 20.0
CROWD = 12
MAX_HOSTILE_LEASES = 40
"""More than its quota allows in HOSTILE_S, even while no other rollout serves: until then it is only slowed
down where others work well. It is shut out after 17 lies. A lie that ends its group makes those about its siblings, which it
got meanwhile, no lies any more, and two leases are on their way: 33 were seen, where half of the messages came twice.
"""
IDENTITY = "a session keeps its role"
PLACES = "an operator always gets in"
QUOTA = "a liar is limited"


class OperatorProcess:
    """Asks the broker several times, as a request may be lost."""

    def __init__(self, machinery: Machinery, process: Process, request: RequeueRequest | StopRequest) -> None:
        self._machinery = machinery
        self._process = process
        self._request = request

    async def run(self, stop: asyncio.Event) -> None:
        context: Any = SimContext(self._machinery.network, self._process)
        try:
            await self._ask(context, stop)
        finally:
            context.destroy()

    async def _ask(self, context: Any, stop: asyncio.Event) -> None:
        client = PeerClient(
            context,
            BATCH,
            self._machinery.settings.broker.batch_endpoint,
            role="operator",
            peer=self._process.name,
            session=self._process.session,
            clock=self._machinery.clock,
            fingerprint=run_fingerprint(self._machinery.settings),
        )
        async with client.running(OPERATOR):
            for _ in range(ASKS):
                if stop.is_set():
                    break
                await client.send(self._request)
                await asyncio.sleep(1.0)

    def check_bounds(self) -> None:
        """It keeps nothing."""


class HostileProcess:
    """For HOSTILE_S it troubles the broker: it takes the learner's session, says Goodbye under a rollout's name, answers
    leases with lies, and opens as many sessions as it can.
    """

    def __init__(self, machinery: Machinery, process: Process) -> None:
        self._machinery = machinery
        self._process = process
        self._audit = machinery.audit
        broker = machinery.settings.broker
        self._endpoints = {WORK: broker.work_endpoint, BATCH: broker.batch_endpoint}
        self._leases: defaultdict[str, set[tuple[int, int]]] = defaultdict(set)
        """What it got from each life of the broker, which forgets quotas."""

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
        session = f"{name}.{self._process.life}"
        return _Link(DealerChannel(context, spec, self._endpoints[spec], f"{name}/{session}"), name, session)

    async def _steal(self, context: Any) -> None:
        """The learner's session has become known, and an operator says Hello with it."""
        audit = self._audit
        for number in itertools.count():
            holder = audit.holder
            if holder is not None:
                # A connection of its own, so that no late answer to the last one is taken for the answer to this one.
                link = self._link(context, BATCH, f"{HOSTILE}-thief-{number}")
                answer = await link.hello("operator", "learner", holder)
                link.channel.close()
                taken = isinstance(answer, Welcome) and audit.holder == holder == audit.durable.run.learner_session
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
        late: list[int] = []  # Versions in requests without an answer yet: a lease may be of one of them.
        while True:
            welcome = await link.hello("rollout", link.name, link.session, seq)
            while isinstance(welcome, Welcome):
                version = self._audit.durable.newest_version
                await link.channel.send(Heartbeat(policy_version=version, status="serving", leases=[]))
                answer = await link.ask(LeaseRequest(request_id=1, capacity=1, policy_version=version), *LEASE_ANSWERS)
                if isinstance(answer, Lease):
                    self._count(answer)
                    chunk, tokens = _lie(answer, max(1, min([version, *late])))
                    await link.channel.send(chunk, tokens, seq)
                    seq += 1
                    if self._machinery.network.loss:
                        break  # The broker judges nothing after a message that is lost, until a Hello says where to go on.
                elif isinstance(answer, Refused):
                    break
                elif answer is None:
                    late.append(version)
                await asyncio.sleep(0.05)
            await asyncio.sleep(1.0)

    def _count(self, lease: Lease) -> None:
        machinery = self._machinery
        router = machinery.network.routers.get(self._endpoints[WORK])
        leases = self._leases[router.process.session if router is not None else ""]
        leases.add((lease.trajectory_id, lease.epoch))
        machinery.audit.require(len(leases) <= MAX_HOSTILE_LEASES, QUOTA, lambda: f"it got {len(leases)} leases")

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


LEASE_ANSWERS = (Lease, NoLease, Refused)


def _is_about_lies(message: Message) -> bool:
    return isinstance(message, Refused) and message.message_type in ("chunk", "heartbeat")


def _lie(lease: Lease, version: int) -> tuple[Chunk, dict[str, Any]]:
    """A chunk after tokens that the broker does not have; for every other new trajectory one that begins it, with a token of
    version 1 although the lease is of a later one.
    """
    is_old = version > 1 and lease.num_tokens == 0 and lease.trajectory_id % 2 == 1
    prompt, token = VersionRun(-1, 1), VersionRun(1 if is_old else version, 1)
    segments = [*([Segment("observation", 0, 1)] if is_old else []), Segment("action", 0, 1)]
    chunk = Chunk(
        trajectory_id=lease.trajectory_id,
        epoch=lease.epoch,
        offset=lease.num_tokens + (0 if is_old else 7),
        num_tokens=len(segments),
        segments=segments,
        version_runs=[prompt, token][-len(segments) :],
        state={},
    )
    tokens = {"token_ids": np.full(len(segments), 1, dtype="<i4"), "logprobs": np.full(len(segments), -1.0, dtype="<f4")}
    return chunk, tokens


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
        """The next answer of one of ``kinds``; None: there is none within 2 s."""
        await self.channel.send(message)
        try:
            async with asyncio.timeout(2.0):
                while True:
                    received = (await self.channel.receive()).received
                    if received is not None and isinstance(received.message, kinds) and not _is_about_lies(received.message):
                        return received.message
        except TimeoutError:
            return None

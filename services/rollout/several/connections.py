"""The connections of a rollout to all brokers of its run: each trajectory is the business of one of them."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager

import zmq.asyncio

from gspo_protocol.codec import Array
from gspo_protocol.messages import Message
from gspo_services.rollout.broker import HEARTBEAT_S, SILENT_S, Brokers, no_answer, open_client
from gspo_services.rollout.gathering import Gatherable
from gspo_services.rollout.several.beats import BeatsInTurn
from gspo_services.rollout.several.versions import AnnouncedVersions
from gspo_services.shared.net import PeerClient, Security
from gspo_services.shared.runtime.clock import Clock
from gspo_services.shared.settings import Settings


class SeveralBrokers(Brokers):
    """See ``Brokers``: what episodes and the service need of one client, over all.

    produces:     what each client does
    waits for:    the broker of the trajectory, and no other; ``flushed``: all of them
    unblocked by: its acknowledgements
    """

    def __init__(self, clients: Sequence[PeerClient], *, lease_s: float, heartbeat_s: float = HEARTBEAT_S) -> None:
        """``clients``: broker 0's first. ``lease_s``: a lease ends so long after the last heartbeat."""
        self.clients = tuple(clients)
        self.beats = BeatsInTurn(len(clients), lease_s=lease_s, heartbeat_s=heartbeat_s)
        self.versions = AnnouncedVersions(len(clients))

    def of(self, trajectory_id: int) -> int:
        """Ids of broker k are k modulo the number of brokers."""
        return trajectory_id % len(self.clients)

    async def send(self, message: Message, arrays: Mapping[str, Array] | None = None) -> None:
        assert isinstance(message, Gatherable), message
        await self.clients[self.of(message.trajectory_id)].send(message, arrays)

    async def acknowledged(self, trajectory_id: int) -> None:
        await self.clients[self.of(trajectory_id)].acknowledged()

    async def flushed(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for client in self.clients:
                tasks.create_task(client.flushed())

    @property
    def num_unacknowledged(self) -> int:
        """Over all brokers."""
        return sum(client.num_unacknowledged for client in self.clients)

    @property
    def there(self) -> list[int]:
        """Those that can be reached now: the others have work meanwhile."""
        return [number for number, each in enumerate(self.clients) if each.connected]

    @property
    def away(self) -> str:
        away = [number for number, each in enumerate(self.clients) if not each.connected or each.silent_s > SILENT_S]
        return "; ".join(f"broker {number} at {self.clients[number].endpoint} is away" for number in away)

    @property
    def unanswered(self) -> str:
        waits = [no_answer(client, f"broker {number}") for number, client in enumerate(self.clients)]
        return "; ".join(filter(None, waits))


@contextmanager
def open_brokers(
    settings: Settings, context: zmq.asyncio.Context, *, name: str, clock: Clock, security: Security
) -> Iterator[Brokers]:
    """Clients of all brokers for the rollout ``name``, closed at the end. Raises: EndpointError."""
    with ExitStack() as stack:
        clients = []
        for number in range(settings.broker.num_brokers):
            client = open_client(settings, context, number, name=name, clock=clock, security=security)
            clients.append(stack.enter_context(closing(client)))
        yield SeveralBrokers(clients, lease_s=settings.broker.lease_s)

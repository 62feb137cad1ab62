"""The connections of a rollout to all brokers of its run: each trajectory is the business of one of them."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Final

import zmq.asyncio

from gspo_protocol.channels import WORK
from gspo_protocol.codec import Array
from gspo_protocol.messages import Message
from gspo_protocol.sessions import new_session
from gspo_services.rollout.brokers.beats import INTERVAL_MOST_S
from gspo_services.rollout.gathering import Gatherable, GatheringClient
from gspo_services.shared.net import PeerClient, Security
from gspo_services.shared.runtime.clock import Clock
from gspo_services.shared.settings import Settings, run_fingerprint

SILENT_S: Final = 4.0 + INTERVAL_MOST_S
"""A broker answers every heartbeat: after this silence it is away."""


class Brokers:
    """What episodes and the service need of one client, over all: the ``EpisodeIntake`` of a run.

    produces:     what each client does
    waits for:    the broker of the trajectory, and no other; ``flushed``: all of them
    unblocked by: its acknowledgements
    """

    def __init__(self, clients: Sequence[PeerClient]) -> None:
        """``clients``: broker 0's first."""
        self.clients: Final = tuple(clients)

    def __len__(self) -> int:
        return len(self.clients)

    def of(self, trajectory_id: int) -> int:
        """The number of the broker whose trajectory it is: ids of broker k are k modulo the number of brokers."""
        return trajectory_id % len(self.clients)

    async def send(self, message: Message, arrays: Mapping[str, Array] | None = None) -> None:
        """See ``PeerClient.send``, for a message of an episode."""
        assert isinstance(message, Gatherable), message
        await self.clients[self.of(message.trajectory_id)].send(message, arrays)

    async def acknowledged(self, trajectory_id: int) -> None:
        """See ``PeerClient.acknowledged``: of what was sent to the broker of this trajectory."""
        await self.clients[self.of(trajectory_id)].acknowledged()

    async def flushed(self) -> None:
        """See ``PeerClient.flushed``: of all brokers."""
        async with asyncio.TaskGroup() as tasks:
            for client in self.clients:
                tasks.create_task(client.flushed())

    @property
    def num_unacknowledged(self) -> int:
        """Over all brokers."""
        return sum(client.num_unacknowledged for client in self.clients)

    @property
    def there(self) -> list[int]:
        """Numbers of the brokers that can be reached now; of one broker alone, its own whatever it is."""
        return [number for number, each in enumerate(self.clients) if each.connected or len(self) == 1]

    @property
    def away(self) -> str:
        """Which brokers cannot be reached now; empty: none."""
        away = [number for number, each in enumerate(self.clients) if not each.connected or each.silent_s > SILENT_S]
        if not away or len(self) == 1:
            return "the broker is away" if away else ""
        return "; ".join(f"broker {number} at {self.clients[number].endpoint} is away" for number in away)

    @property
    def unanswered(self) -> str:
        """Which brokers have never answered, and why if known; empty once all have."""
        waits = []
        for number, each in enumerate(self.clients):
            if each.welcome is None:
                which = "the broker" if len(self) == 1 else f"broker {number}"
                wait = f"no answer from {which} at {each.endpoint} for {each.silent_s:.0f} s"
                waits.append(f"{wait}: {each.refused}" if each.refused else wait)
        return "; ".join(waits)


@contextmanager
def open_brokers(
    settings: Settings, context: zmq.asyncio.Context, *, name: str, clock: Clock, security: Security
) -> Iterator[Brokers]:
    """Clients of all brokers for the rollout ``name``, closed at the end. Raises: EndpointError."""
    num_brokers = settings.broker.num_brokers
    with ExitStack() as stack:
        clients = []
        for number, endpoint in enumerate(settings.broker.work_endpoints):
            # A session for each: a broker need not know by what the others know this process.
            client = GatheringClient(
                context, WORK, endpoint,
                role="rollout", peer=name, session=new_session(), clock=clock, security=security,
                fingerprint=run_fingerprint(settings), expected=(number, num_brokers),
            )  # fmt: skip
            clients.append(stack.enter_context(closing(client)))
        yield Brokers(clients)

"""The only broker of a run, as a rollout sees it."""

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass

import zmq.asyncio

from gspo_protocol.channels import WORK
from gspo_protocol.codec import Array
from gspo_protocol.messages import Message
from gspo_protocol.sessions import new_session
from gspo_services.rollout.broker.port import HEARTBEAT_S, SILENT_S, Brokers
from gspo_services.rollout.gathering import Gatherable, GatheringClient
from gspo_services.shared.net import PeerClient, Security
from gspo_services.shared.runtime.clock import Clock
from gspo_services.shared.settings import Settings, run_fingerprint


@dataclass(frozen=True)
class EveryBeat:
    """The ``Beats`` of one broker: it hears each."""

    heartbeat_s: float = HEARTBEAT_S

    def next(self) -> list[int]:
        return [0]


class NewestVersion:
    """The ``KnownVersions`` of one broker: the rollout follows it, also back to what is left after a loss."""

    waits = ""

    def __init__(self) -> None:
        self.common = (0, "")

    def announced(self, broker: int, version: int, endpoint: str) -> None:
        assert broker == 0, broker
        self.common = (version, endpoint)

    def may_have(self, broker: int, version: int) -> bool:
        """Whatever is served here, the broker has announced."""
        return True


class OneBroker(Brokers):
    """See ``Brokers``; all trajectories are this broker's."""

    def __init__(self, client: PeerClient, *, heartbeat_s: float = HEARTBEAT_S) -> None:
        self.clients = (client,)
        self.beats = EveryBeat(heartbeat_s)
        self.versions = NewestVersion()
        self._client = client

    def of(self, trajectory_id: int) -> int:
        return 0

    async def send(self, message: Message, arrays: Mapping[str, Array] | None = None) -> None:
        assert isinstance(message, Gatherable), message
        await self._client.send(message, arrays)

    async def acknowledged(self, trajectory_id: int) -> None:
        await self._client.acknowledged()

    async def flushed(self) -> None:
        await self._client.flushed()

    @property
    def num_unacknowledged(self) -> int:
        return self._client.num_unacknowledged

    @property
    def there(self) -> list[int]:
        """It is waited for even while it is away: nobody else has work."""
        return [0]

    @property
    def away(self) -> str:
        is_away = not self._client.connected or self._client.silent_s > SILENT_S
        return "the broker is away" if is_away else ""

    @property
    def unanswered(self) -> str:
        return no_answer(self._client, "the broker")


def no_answer(client: PeerClient, name: str) -> str:
    """That the broker called ``name`` has never answered, and why if known; empty once it has."""
    if client.welcome is not None:
        return ""
    wait = f"no answer from {name} at {client.endpoint} for {client.silent_s:.0f} s"
    return f"{wait}: {client.refused}" if client.refused else wait


def open_client(
    settings: Settings, context: zmq.asyncio.Context, number: int, *, name: str, clock: Clock, security: Security
) -> PeerClient:
    """A connection of the rollout ``name`` to broker ``number``. Raises: EndpointError."""
    # A session for each: a broker need not know by what the others know this process.
    return GatheringClient(
        context, WORK, settings.broker.work_endpoints[number],
        role="rollout", peer=name, session=new_session(), clock=clock, security=security,
        fingerprint=run_fingerprint(settings), expected=(number, settings.broker.num_brokers),
    )  # fmt: skip


@contextmanager
def open_broker(
    settings: Settings, context: zmq.asyncio.Context, *, name: str, clock: Clock, security: Security
) -> Iterator[Brokers]:
    """The run's only broker for the rollout ``name``; the connection is closed at the end. Raises: EndpointError."""
    with closing(open_client(settings, context, 0, name=name, clock=clock, security=security)) as client:
        yield OneBroker(client)

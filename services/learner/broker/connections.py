"""What the learner says to its broker, or to all brokers that share its run, and hears from them."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from gspo_protocol.messages import (
    BatchFailed,
    BatchRequest,
    Checkpointed,
    Heartbeat,
    LedgerCommit,
    Published,
    Resume,
    Trained,
    Welcome,
)
from gspo_services.learner.broker.batches import Answer
from gspo_services.learner.broker.connection import BrokerConnection, Heard
from gspo_services.shared.settings import Settings

OpenConnection = Callable[[int, Heard], BrokerConnection]
"""Makes the connection to the broker of this number; it is not open yet."""
Question = Resume | BatchRequest | BatchFailed | Checkpointed


class BrokerConnections(ABC):
    """The connections of a learner: to its broker (``OneConnection``), or to each of several that share the run.

    Whoever has broker 0 is the learner. What is heard is given to ``arrived``: a batch in its parts, or what comes in its
    place.
    """

    welcomes: Sequence[Welcome] = ()
    """See ``BrokerPort``."""

    @property
    @abstractmethod
    def commits(self) -> Sequence[LedgerCommit | None]:
        """See ``BrokerPort``."""

    @property
    @abstractmethod
    def endpoint(self) -> str:
        """The address of a broker that acknowledges nothing, if one does not."""

    @property
    @abstractmethod
    def reason_to_wait(self) -> str:
        """See ``BrokerPort``."""

    @property
    @abstractmethod
    def scores(self) -> Mapping[int, float | None]:
        """See ``BrokerPort``."""

    @abstractmethod
    async def run(self, tasks: asyncio.TaskGroup) -> None:
        """Have ``tasks`` run the connections, each as soon as it may be open."""

    @abstractmethod
    def close(self) -> None:
        """Close all of them, also those that were never open."""

    @abstractmethod
    async def welcome(self) -> Welcome:
        """Wait for every broker's Welcome: what they say together."""

    @abstractmethod
    async def tell(self, message: Question) -> None:
        """See ``BrokerPort``."""

    @abstractmethod
    def reports(self, trained: Trained) -> Sequence[Trained]:
        """What each broker is to be told of a batch that was trained: now, before the next batch is asked for."""

    @abstractmethod
    async def report(self, reports: Sequence[Trained]) -> None:
        """Send what ``reports`` gave."""

    @abstractmethod
    async def announce(self, published: Published) -> None:
        """Send a new version."""

    @abstractmethod
    def acknowledged(self, next_batch: int) -> bool:
        """See ``BrokerPort``."""

    @abstractmethod
    async def flushed(self) -> None:
        """Wait until everything is acknowledged."""

    @abstractmethod
    async def part_taken(self) -> None:
        """The training thread has taken a part: ask for one more."""

    @abstractmethod
    async def repeat(self, not_ready: Callable[[str], None]) -> None:
        """Ask again for what did not come. ``not_ready`` is told of a broker that does not admit this learner."""

    @abstractmethod
    async def beat(self, heartbeat: Heartbeat) -> None:
        """Say that this learner lives."""


MakeConnections = Callable[[Settings, OpenConnection, Callable[[Answer], None]], BrokerConnections]
"""From the settings, what makes a connection, and who gets what is heard. Broker 0's connection is open afterwards.
Raises: EndpointError; ConfigurationError when keys cannot be used."""

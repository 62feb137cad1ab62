"""What a rollout needs of its broker, or of all brokers that share its run."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Final, Protocol

from gspo_protocol.codec import Array
from gspo_protocol.messages import Message
from gspo_services.shared.net import PeerClient

HEARTBEAT_S: Final = 1.0
INTERVAL_MOST_S: Final = 3.0
"""So long at most a broker does not hear that the rollout is there, nor the rollout the broker's news that got lost."""
SILENT_S: Final = 4.0 + INTERVAL_MOST_S
"""A broker answers every heartbeat: after this silence it is away."""


class Beats(Protocol):
    """When which broker hears a heartbeat."""

    @property
    def heartbeat_s(self) -> float:
        """From one beat to the next."""

    def next(self) -> list[int]:
        """The numbers of the brokers that are due now."""


class KnownVersions(Protocol):
    """The versions that brokers have announced to this rollout."""

    def announced(self, broker: int, version: int, endpoint: str) -> None:
        """``broker`` says that ``version`` is its newest, to be fetched at ``endpoint``."""

    @property
    def common(self) -> tuple[int, str]:
        """The version to move to, and where it is; 0: there is none."""

    @property
    def waits(self) -> str:
        """Why there is no version to move to, although some were announced; empty: there is one, or none was."""

    def may_have(self, broker: int, version: int) -> bool:
        """Whether ``broker`` takes tokens of ``version``."""


class Brokers(ABC):
    """The brokers of a run as its rollouts see them: one (``OneBroker``), or several that share it. It is also the
    ``EpisodeIntake`` of the run. Brokers are counted from 0 on."""

    clients: tuple[PeerClient, ...]
    """The connection to each broker, broker 0's first."""
    beats: Beats
    versions: KnownVersions

    def __len__(self) -> int:
        return len(self.clients)

    @abstractmethod
    def of(self, trajectory_id: int) -> int:
        """The number of the broker whose trajectory it is."""

    @abstractmethod
    async def send(self, message: Message, arrays: Mapping[str, Array] | None = None) -> None:
        """See ``PeerClient.send``, for a message of an episode."""

    @abstractmethod
    async def acknowledged(self, trajectory_id: int) -> None:
        """See ``PeerClient.acknowledged``: of what was sent to the broker of this trajectory."""

    @abstractmethod
    async def flushed(self) -> None:
        """See ``PeerClient.flushed``."""

    @property
    @abstractmethod
    def num_unacknowledged(self) -> int:
        """Messages that no broker has acknowledged yet."""

    @property
    @abstractmethod
    def there(self) -> list[int]:
        """Numbers of the brokers to wait for; see ``TimeSharing``."""

    @property
    @abstractmethod
    def away(self) -> str:
        """Which brokers cannot be reached now; empty: none."""

    @property
    @abstractmethod
    def unanswered(self) -> str:
        """Which brokers have never answered, and why if known; empty once all have."""

"""Rounds: what was decided and is not durable yet. The next one is decided while the disk has the one before."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

import structlog

from gspo_protocol.limits import WINDOW_BYTES
from gspo_services.broker.ledger import Action, Reshelve, SessionKey
from gspo_services.broker.metrics import BrokerMetrics
from gspo_services.broker.store import RowChanges, Store, StoreUnavailable
from gspo_services.shared.runtime.clock import Clock
from gspo_services.shared.runtime.lifecycle import until_stopped
from gspo_services.shared.runtime.telemetry import Health

log = structlog.get_logger()

MAX_EVENTS_PER_COMMIT: Final = 512
MAX_BYTES_PER_COMMIT: Final = WINDOW_BYTES
"""Bytes of a round's messages; the last one may exceed it."""
RETRY_FIRST_S: Final = 0.1
RETRY_MOST_S: Final = 5.0


InThread = Callable[[Callable[[], None]], Awaitable[None]]
"""Runs a function in the store's thread."""


@dataclass(kw_only=True)
class DecidedRound:
    """What some arrivals led to. ``effects`` leave when ``changes`` are durable, and never before."""

    changes: RowChanges = field(default_factory=RowChanges)
    effects: list[Action] = field(default_factory=list)
    num_events: int = 0
    num_bytes: int = 0
    """Bytes of the round's messages."""
    gone: list[SessionKey] = field(default_factory=list)
    """Sessions that have ended by now; ``effects`` may still be for them."""
    is_last: bool = False

    @property
    def is_full(self) -> bool:
        return self.num_events >= MAX_EVENTS_PER_COMMIT or self.num_bytes >= MAX_BYTES_PER_COMMIT

    @property
    def needs_the_disk(self) -> bool:
        """Whether an effect reads the ledger back from the disk, which must hold everything that was decided."""
        return any(isinstance(each, Reshelve) for each in self.effects)


class NextRound:
    """The one round that is decided ahead of the disk: arrivals add to it until it is taken.

    Nothing more is decided while it is full, while an effect in it needs the disk, and while the disk refuses: what comes
    then waits in the bounded queues. A refused commit takes nothing back: it is tried again, before the round behind it.
    """

    def __init__(self) -> None:
        self.open = DecidedRound()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._decided = asyncio.Event()
        self._held = False

    async def room(self) -> None:
        """Wait until more may be decided."""
        await self._has_room.wait()

    def add(self, num_events: int, num_bytes: int) -> bool:
        """Count a message that the open round is about to get. Returns whether it has room for another one."""
        self.open.num_events += num_events
        self.open.num_bytes += num_bytes
        return not self.open.is_full

    def decided(self, num_messages: int) -> None:
        """The open round has what was counted. None: time has passed, which must not fill memory either."""
        self.open.num_events += not num_messages
        self._decided.set()
        self._look()

    async def take(self) -> DecidedRound:
        """Wait for a round that was decided, and begin another one behind it."""
        await self._decided.wait()
        return self.take_now()

    def take_now(self) -> DecidedRound:
        """The open round, also an empty one."""
        taken, self.open = self.open, DecidedRound()
        self._decided.clear()
        self._held = taken.needs_the_disk
        self._look()
        return taken

    def refused(self) -> None:
        """The disk refuses the round that was taken."""
        self._held = True
        self._look()

    def done(self) -> None:
        """The round that was taken is durable and carried out."""
        self._held = False
        self._look()

    def _look(self) -> None:
        if self._held or self.open.is_full or self.open.needs_the_disk:
            self._has_room.clear()
        else:
            self._has_room.set()


class Committer:
    """Makes rounds durable, one after another."""

    def __init__(
        self, store: Store, in_thread: InThread, next_round: NextRound, metrics: BrokerMetrics, health: Health, clock: Clock
    ) -> None:
        self._store = store
        self._in_thread = in_thread
        self._next_round = next_round
        self._metrics = metrics
        self._health = health
        self._clock = clock

    async def commit(self, changes: RowChanges, stop: asyncio.Event) -> bool:
        """Commit, trying again until it succeeds. What arrives meanwhile waits in bounded queues or is dropped.

        Returns False when ``stop`` was set first: nothing of ``changes`` was acknowledged.
        """
        delay_s = RETRY_FIRST_S
        while True:
            started = self._clock.now()
            try:
                await self._in_thread(lambda: self._store.commit(changes))
            except StoreUnavailable as error:
                self._next_round.refused()
                self._metrics.commit_failures.inc()
                self._health.not_ready(str(error))
                log.error("commit_failed", error=str(error), retry_s=delay_s, rows=len(changes.rows))
                self._health.beat()
                if await until_stopped(stop, delay_s):
                    log.error("stopped_with_uncommitted_messages", rows=len(changes.rows))
                    return False
                delay_s = min(2 * delay_s, RETRY_MOST_S)
                continue
            self._metrics.commit_s.observe(self._clock.now() - started)
            return True

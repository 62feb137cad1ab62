"""The learner's connection to one broker: its open requests, and its reports."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from msgspec.structs import replace

from gspo_protocol.codec import Array
from gspo_protocol.messages import (
    Batch,
    BatchPart,
    BatchPending,
    BatchRequest,
    EndOfRun,
    Evaluated,
    LedgerCommit,
    Message,
    Published,
    Resume,
    SkipBatch,
    StopRequest,
    Trained,
    Welcome,
)
from gspo_protocol.messages.base import shortened
from gspo_services.learner.broker.batches import Answer, BatchAnnounced, PartArrived
from gspo_services.learner.broker.parts import DamagedPart, PartStream
from gspo_services.learner.broker.scores import updated_scores
from gspo_services.shared.net import Delivered, PeerClient
from gspo_services.shared.runtime.errors import ServiceError

Heard = Callable[["BrokerConnection", Answer], Awaitable[None]]


class BrokerConnection:
    """One of the brokers that share a run, or the only one.

    produces:     ``heard``: the answer to the request for a batch, then the parts of this broker's share, in order and whole
    waits for:    the broker; for further parts until those that came are taken
    unblocked by: Batch, BatchPart, SkipBatch, EndOfRun; ``part_taken``; acknowledgements
    """

    def __init__(self, number: int, endpoint: str, open_client: Callable[[], PeerClient], heard: Heard) -> None:
        """``open_client`` connects to the broker at ``endpoint``; it is called by ``open``."""
        self.number: Final = number
        self.endpoint: Final = endpoint
        self._open_client = open_client
        self._opened: PeerClient | None = None
        self._is_open = asyncio.Event()
        self._heard = heard
        self._asked: BatchRequest | None = None
        """The last request..."""
        self._wanted: BatchRequest | None = None
        """...while it is not answered."""
        self._stop: StopRequest | None = None
        self._announced: Batch | None = None
        """The current or last share."""
        self._parts: PartStream | None = None
        """The parts of the current share."""
        self._waited_for: tuple[int, int] | None = None
        """The part awaited at the last look."""
        self._resume: Resume | None = None
        self._handshakes_seen = 0
        self._unacknowledged: deque[tuple[int, int]] = deque()
        """For each report sent: the number of acknowledged messages that includes it; the next batch."""
        self._acknowledged_batches = 0
        self._num_published: int | None = None
        """The batches that the newest version was trained on that this learner has sent; None: it has sent none."""
        self.pending = ""
        """What the broker's share waits for, in its words; empty: unknown."""
        self.scores: Mapping[int, float | None] = {}
        """See ``BrokerPort``. Replaced, never changed: the training thread reads it."""

    # --- the connection ------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Connect. Raises: EndpointError; ConfigurationError when keys cannot be used."""
        self._opened = self._open_client()
        self._is_open.set()

    def close(self) -> None:
        """Also when the connection was never opened."""
        if self._opened is not None:
            self._opened.close()

    @property
    def is_open(self) -> bool:
        return self._opened is not None

    @property
    def connected(self) -> bool:
        return self._opened is not None and self._opened.connected

    @property
    def commit(self) -> LedgerCommit | None:
        """The newest commit of the broker's ledger that this learner was told of; None: of none yet."""
        return None if self._opened is None else self._opened.commit

    @property
    def silent_s(self) -> float:
        """Seconds since anything was heard from the broker, or since the connection was opened; 0 before."""
        return 0.0 if self._opened is None else self._opened.silent_s

    def be_quiet(self, *, quiet: bool) -> None:
        """Send nothing to the broker while ``quiet``, as if cut off; afterwards send everything that it has missed."""
        if self._opened is not None:
            self._opened.be_quiet(quiet=quiet)

    @property
    def refused(self) -> str:
        """Why the broker refuses this learner; empty while it does not, or has not answered."""
        return "" if self._opened is None else self._opened.refused

    @property
    def owes(self) -> bool:
        """Whether the broker has not acknowledged everything."""
        return self._opened is not None and self._opened.num_unacknowledged > 0

    async def run(self) -> None:
        """Keep the connection up until cancelled. Raises: ServiceError."""
        await self._client.run()

    async def welcome(self) -> Welcome:
        """Wait for the broker's Welcome."""
        await self._is_open.wait()
        return await self._client.connected_welcome()

    async def flushed(self) -> None:
        """Wait until the broker has acknowledged everything."""
        await self._client.flushed()

    async def receive(self) -> None:
        """Handle messages until cancelled. Raises: ServiceError for parts that arrive damaged again and again."""
        while True:
            await self._on_message(await self._client.inbox.get())

    @property
    def _client(self) -> PeerClient:
        assert self._opened is not None, f"broker {self.number} is used before it is connected to"
        return self._opened

    # --- sent ----------------------------------------------------------------------------------------------------------

    async def send(self, message: Message) -> None:
        """As ``PeerClient.send``. Nothing is sent over a connection that is not open."""
        if self._opened is not None:
            await self._opened.send(message)

    def want(self, request: BatchRequest) -> None:
        """Wait for the answer to ``request`` from now on; ``ask_again`` sends it."""
        self._asked = self._wanted = request
        self._stop = self._announced = self._parts = None

    def resume_at(self, next_batch: int) -> None:
        """Send a Resume with this position after each new handshake."""
        self._resume = Resume(next_batch=next_batch)

    async def stop(self, reason: str) -> None:
        """Another broker has ended the run: tell this one until it ends the run, too.

        A share that it has assembled already is not trained. It answers the request for the next one with the end,
        and that answer shows that it has stopped.
        """
        self._stop = StopRequest(reason=shortened(reason))
        self._announced = self._parts = None
        if self._wanted is None and self._asked is not None:
            self._asked = self._wanted = replace(self._asked, index=self._asked.index + 1)
        await self.ask_again()

    async def announce(self, message: Published | Trained) -> None:
        """Send a version or a batch's report in the form that this broker needs.

        The learner's former life may have ended when it had told this broker more than another one. The other one is told
        again; for this one those weights are older than its newest version, and the report is of a batch that is trained
        again and makes none.
        """
        known = self._batches_of_newest()
        if isinstance(message, Published):
            if message.trained_batches < known:
                return
            await self._client.send(message)
            self._num_published = message.trained_batches
        else:
            if message.index < known - 1:
                message = replace(message, policy_version=0)
            await self._client.send(message)
            with_this = self._client.num_acknowledged + self._client.num_unacknowledged
            self._unacknowledged.append((with_this, message.index + 1))
        self.acknowledged_batches()

    def acknowledged_batches(self) -> int:
        """Return the first batch whose report the broker has not acknowledged."""
        while self._unacknowledged and self._unacknowledged[0][0] <= self._client.num_acknowledged:
            _, self._acknowledged_batches = self._unacknowledged.popleft()
        return self._acknowledged_batches

    async def ask_again(self) -> None:
        """Repeat unanswered requests."""
        # After a new handshake the checkpoint's position goes first.
        if self._wanted is None or self._opened is None or self._handshakes_seen != self._opened.num_handshakes:
            return
        if self._stop is not None:
            await self._opened.send(self._stop)
        await self._opened.send(self._wanted)

    async def ask_for_silent_parts(self) -> None:
        """Ask again for parts if none has come since the last call; otherwise each would be sent twice."""
        waits_for = None if self._parts is None else (self._parts.index, self._parts.next_part)
        if self._parts is not None and waits_for == self._waited_for:
            self._parts.ask_again()
            await self.ask_for_parts()
        self._waited_for = waits_for

    async def part_taken(self) -> None:
        """Ask for one more part: the training thread has taken one."""
        if self._parts is not None:
            self._parts.took()
            await self.ask_for_parts()

    def begin_again(self) -> None:
        """Take the share again from its first part; ``ask_for_parts`` asks for it."""
        if self._announced is not None:
            self._parts = PartStream(self._announced)
            self._parts.ask_again()

    async def ask_for_parts(self) -> None:
        """Ask for as many parts as there is room for."""
        request = None if self._parts is None else self._parts.request()
        if request is not None:
            await self._client.send(request)

    def _batches_of_newest(self) -> int:
        """Return the number of batches that the broker's newest version was trained on."""
        if self._num_published is not None:
            return self._num_published
        # Its state before this learner told it anything.
        welcome = self._client.welcome
        return 0 if welcome is None else welcome.trained_batches

    # --- received ------------------------------------------------------------------------------------------------------

    async def _on_message(self, delivered: Delivered) -> None:
        message = delivered.message
        wanted = self._wanted
        if isinstance(message, Batch | SkipBatch | EndOfRun) and wanted is not None and message.index == wanted.index:
            await self._on_answer(message, delivered.arrays)
        elif isinstance(message, BatchPart):
            await self._on_part(message, delivered.arrays)
        elif isinstance(message, SkipBatch) and self._announced is not None and message.index == self._announced.index:
            self._announced = self._parts = None  # Some part of it cannot be read.
            await self._heard(self, message)
        elif isinstance(message, BatchPending):
            self.pending = f"{message.groups_ready} of {message.groups_needed} groups; {message.waiting_for}"
        elif isinstance(message, Evaluated):
            self.scores = updated_scores(self.scores, message)
        elif isinstance(message, Welcome):
            await self._on_welcome()

    async def _on_answer(self, answer: Batch | SkipBatch | EndOfRun, arrays: dict[str, Array]) -> None:
        self._wanted = None
        if isinstance(answer, Batch):
            self._announced, self._parts = answer, PartStream(answer)
            await self._heard(self, BatchAnnounced(batch=answer, arrays=arrays))
            await self.ask_for_parts()
        else:
            await self._heard(self, answer)

    async def _on_welcome(self) -> None:
        if self._resume is not None:
            await self._client.send(self._resume)
        self._handshakes_seen += 1
        await self.ask_again()
        if self._parts is not None:
            self._parts.ask_again()
            await self.ask_for_parts()

    async def _on_part(self, part: BatchPart, arrays: dict[str, Array]) -> None:
        parts = self._parts
        if parts is None:
            return  # of a batch that is complete, or to be skipped
        try:
            is_next = parts.offer(part, arrays)
        except DamagedPart as error:
            raise ServiceError(f"the broker at {self.endpoint}: {error}") from error
        if is_next:
            if parts.complete:
                self._parts = None
            await self._heard(self, PartArrived(part=part, arrays=arrays))
        await self.ask_for_parts()

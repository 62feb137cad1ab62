"""Sends batches to the learner: what one consists of at once, its parts one at a time, with other traffic between them."""

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, Protocol, TypeVar

import structlog

from gspo_protocol.codec import Array, decode, encode
from gspo_protocol.errors import ProtocolError
from gspo_protocol.limits import MAX_PARTS_AHEAD
from gspo_protocol.messages import Batch, Message, Refused
from gspo_protocol.messages.base import shortened
from gspo_services.broker.ledger import DeliverParts, SessionKey
from gspo_services.broker.sending.batches import StoredBatch, recorded_batch
from gspo_services.broker.store import Store, StoreCorrupt

log = structlog.get_logger()
T = TypeVar("T")

UNSENDABLE: Final = (StoreCorrupt, ProtocolError, TypeError, ValueError, OverflowError)
"""What says that a batch cannot be read, or does not fit its messages."""


class InThread(Protocol):
    """Runs a function in the store's thread."""

    def __call__(self, function: Callable[[], T], /) -> Awaitable[T]: ...


Send = Callable[[SessionKey, Message, dict[str, Array]], Awaitable[bool]]
"""Sends to a session; False when it cannot be reached now."""


class BatchSender:
    """Keeps the rows of one batch, and no token: each part is read when its turn comes, sent, and forgotten.

    produces:     Batch, BatchPart
    waits for:    the store's thread
    unblocked by: the end of a commit
    """

    def __init__(
        self, store: Store, in_thread: InThread, send: Send, *, part_tokens: int, with_experts: bool = False
    ) -> None:
        self._store = store
        self._in_thread = in_thread
        self._send = send
        self._part_tokens = part_tokens
        self._with_experts = with_experts
        self._batch: StoredBatch | None = None
        self._wanted: deque[tuple[SessionKey, int, int]] = deque()
        self.unreadable: list[tuple[SessionKey, int, str]] = []
        """Who was to get a batch that cannot be delivered, and why: for the ledger, which empties it."""

    @property
    def has_parts(self) -> bool:
        """Whether a part waits to be sent."""
        return bool(self._wanted)

    async def announce(self, sender: SessionKey, index: int) -> None:
        """Send what a batch consists of; its first part follows."""
        try:
            batch, (message, arrays) = await self._in_thread(lambda: self._announcement(index))
            sent = await self._send(sender, message, arrays)
        except UNSENDABLE as error:
            self._give_up(sender, index, error)
            return
        fields = {"num_trajectories": len(message.items), "num_parts": batch.num_parts, "peer": sender.peer}
        log.info("batch_sent" if sent else "batch_not_sent", batch=index, **fields)
        if sent:
            self._want(sender, index, range(1))

    def want(self, action: DeliverParts) -> None:
        """Send these parts, one at each call of ``send_next``."""
        self._want(action.to, action.index, range(action.part, action.part + action.count))

    async def send_next(self) -> None:
        """Send one part, if one is wanted. The learner asks again for what it does not get."""
        if not self._wanted:
            return
        sender, index, part = self._wanted.popleft()
        try:
            batch = await self._in_thread(lambda: self._recorded(index))
            if part >= batch.num_parts:
                await self._refuse(sender, f"part is {part}: batch {index} has {batch.num_parts} parts, counted from 0")
                return
            message, arrays = await self._in_thread(lambda: batch.part(part))
            message.check_arrays(arrays)
            await self._send(sender, message, arrays)
        except UNSENDABLE as error:
            self._give_up(sender, index, error)

    def _want(self, sender: SessionKey, index: int, parts: range) -> None:
        """One learner has the run, and takes one batch at a time: what another wanted is not sent any more."""
        if self._wanted and self._wanted[0][:2] != (sender, index):
            self._wanted.clear()
        for part in parts:
            if len(self._wanted) < MAX_PARTS_AHEAD and (sender, index, part) not in self._wanted:
                self._wanted.append((sender, index, part))

    def _announcement(self, index: int) -> tuple[StoredBatch, tuple[Batch, dict[str, Array]]]:
        batch = self._recorded(index)
        message, arrays = batch.announcement()
        # The learner would ask for ever for what it cannot decode.
        decode(encode(message, arrays))
        return batch, (message, arrays)

    def _recorded(self, index: int) -> StoredBatch:
        """The rows of a batch: those of the one that is sent are kept."""
        if self._batch is None or self._batch.index != index:
            self._batch = recorded_batch(self._store, index, part_tokens=self._part_tokens, with_experts=self._with_experts)
        return self._batch

    async def _refuse(self, sender: SessionKey, reason: str) -> None:
        refused = Refused(reason=shortened(f"batch_part_request: {reason}"), message_type="batch_part_request")
        await self._send(sender, refused, {})

    def _give_up(self, sender: SessionKey, index: int, error: Exception) -> None:
        self._wanted.clear()
        self._batch = None
        self.unreadable.append((sender, index, f"{type(error).__name__}: {error}"))

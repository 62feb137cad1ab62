"""Sends an episode's tokens and journal entries, so that any part that arrives can be continued.

An episode's messages leave one after another, and the broker takes them in that order. So a resumed lease has
a prefix of what was written here, up to some message.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from gspo_protocol.errors import ProtocolError
from gspo_protocol.limits import MAX_ENTRIES, MAX_ENTRY_BYTES, MAX_JOURNAL_BYTES
from gspo_protocol.messages import Finish, Journal, Plain
from gspo_protocol.messages.journal import pack_entry
from gspo_services.rollout.episodes.log import EpisodeLog
from gspo_services.rollout.metrics import RolloutMetrics
from gspo_services.rollout.work import EpisodeFailed, EpisodeIntake

CALL_ENTRY_BYTES: Final = 512
"""An upper bound on the entry of a call."""


class EpisodeWriter:
    """The one place from which an episode's messages leave. ``tokens`` and ``entry`` are called inside ``alone``."""

    def __init__(self, log: EpisodeLog, entries: list[Plain], broker: EpisodeIntake, metrics: RolloutMetrics) -> None:
        """``entries``: the lease's."""
        self._log = log
        self._broker = broker
        self._metrics = metrics
        self._lock = asyncio.Lock()
        self._num_entries = len(entries)
        self._journal_bytes = sum(len(pack_entry(entry)) for entry in entries)

    @asynccontextmanager
    async def alone(self) -> AsyncIterator["EpisodeWriter"]:
        """Inside, this task alone sends messages of the episode."""
        async with self._lock:
            yield self

    @property
    def has_room_for_call(self) -> bool:
        """Whether the journal takes the entry of one more call."""
        return self._num_entries < MAX_ENTRIES and self._journal_bytes + CALL_ENTRY_BYTES <= MAX_JOURNAL_BYTES

    async def tokens(self) -> None:
        """Send the tokens that were not sent yet. Raises: EpisodeFailed."""
        while (following := self._log.next_chunk()) is not None:
            chunk, arrays = following
            try:
                await self._broker.send(chunk, arrays)
            except ProtocolError as error:
                raise EpisodeFailed(f"the generated tokens do not make a valid message: {error}") from error
            self._log.sent(chunk)
            self._metrics.chunks.inc()

    async def entry(self, entry: Plain) -> None:
        """Append to the journal. Raises: EpisodeFailed when the broker would refuse the entry."""
        try:
            num_bytes = len(pack_entry(entry))
        except (TypeError, ValueError, OverflowError) as error:
            raise EpisodeFailed(f"the journal's entry is not plain data: {error}") from error
        for what, found, allowed in (
            ("bytes in one entry of the journal (MAX_ENTRY_BYTES)", num_bytes, MAX_ENTRY_BYTES),
            ("bytes in the journal (MAX_JOURNAL_BYTES)", self._journal_bytes + num_bytes, MAX_JOURNAL_BYTES),
            ("entries in the journal (MAX_ENTRIES)", self._num_entries + 1, MAX_ENTRIES),
        ):
            if found > allowed:
                raise EpisodeFailed(f"{found} {what}, {allowed} allowed: keep large results of steps in files")
        message = Journal(trajectory_id=self._log.trajectory_id, epoch=self._log.epoch, place=self._num_entries, entry=entry)
        try:
            await self._broker.send(message)
        except ProtocolError as error:
            raise EpisodeFailed(f"the journal's entry is not a message: {error}") from error
        self._num_entries += 1
        self._journal_bytes += num_bytes

    async def durable(self) -> None:
        """Wait until the broker has acknowledged everything that was sent."""
        await self._broker.acknowledged()

    async def finish(self, finish: Finish) -> None:
        """Send the rest of the tokens, and the end. Raises: EpisodeFailed."""
        async with self.alone():
            await self.tokens()
            await self._broker.send(finish)

"""The learner's lines to all brokers that share its run."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import structlog

from gspo_protocol.messages import BatchFailed, BatchRequest, EndOfRun, Heartbeat, Published, Trained, Welcome
from gspo_services.learner.broker import Answer, BatchAnnounced, BatchLines, BrokerLine, OpenLine, Question
from gspo_services.learner.several.round import BatchRound
from gspo_services.learner.several.welcome import merged_welcome
from gspo_services.shared.runtime.errors import ServiceError
from gspo_services.shared.settings import Settings

log = structlog.get_logger()

WITHOUT_FIRST_S: Final = 5.0
"""Silence of broker 0 after which nothing is said to the others: by then it may give the run to another learner."""


class SeveralLines(BatchLines):
    """See ``BatchLines``. The brokers hear everything in their order, and broker 0's Welcome comes before the others are
    asked for theirs: no two learners have some brokers each.

    produces:     the batch of all shares, part by part
    waits for:    every broker
    unblocked by: their answers; ``part_taken``
    """

    def __init__(self, settings: Settings, open_line: OpenLine, arrived: Callable[[Answer], None]) -> None:
        """Connect to broker 0. Raises: as ``MakeLines``."""
        self._num_batches = settings.run.num_batches
        self._arrived = arrived
        self._round: BatchRound | None = None
        """Of the last request."""
        self._lines = [open_line(number, self._heard) for number in range(settings.broker.num_brokers)]
        self._lines[0].open()
        self._is_quiet = False

    @property
    def endpoint(self) -> str:
        return next((line for line in self._lines if line.owes), self._lines[0]).endpoint

    @property
    def reason_to_wait(self) -> str:
        line = min(self._lines, key=self._readiness)
        name = f"broker {line.number}"
        if line.refused:
            return f"{name}: {line.refused}"
        if not line.connected:
            return f"no answer from {name} at {line.endpoint}"
        return f"{name}: {line.pending}" if line.pending else name

    def _readiness(self, line: BrokerLine) -> int:
        """The lower, the more it is this broker that is waited for."""
        if line.refused:
            return 0
        if not line.connected:
            return 1
        waits = self._round is not None and (self._round.waits_for(line.number) or self._round.turn == line.number)
        return 2 if waits else 3

    @property
    def scores(self) -> Mapping[int, float | None]:
        """Broker 0 evaluates."""
        return self._lines[0].scores

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        """Run the line to broker 0 and, once it has welcomed this learner, the lines to the others."""
        for line in self._lines:
            if line.number:
                await self._lines[0].welcome()
                # Only now: nobody reads the monitor of a line that does not run.
                line.open()
            tasks.create_task(line.run(), name=f"batch-client-{line.number}")
            tasks.create_task(line.receive(), name=f"receive-{line.number}")

    def close(self) -> None:
        for line in self._lines:
            line.close()

    # --- sent ----------------------------------------------------------------------------------------------------------

    async def welcome(self) -> Welcome:
        # Those of the others are asked for after broker 0's.
        self.welcomes = [await line.welcome() for line in self._lines]
        return merged_welcome(self.welcomes)

    async def tell(self, message: Question) -> None:
        if isinstance(message, BatchRequest):
            self._round = BatchRound(message.index, len(self._lines))
            for line in self._lines:
                line.want(message)
        elif not isinstance(message, BatchFailed):
            for line in self._lines:
                line.resume_at(message.next_batch)
        for line in self._lines:
            await line.send(message)

    def reports(self, trained: Trained) -> Sequence[Trained]:
        if self._round is None or self._round.index != trained.index:
            return [trained] * len(self._lines)
        return self._round.reports(trained)

    async def report(self, reports: Sequence[Trained]) -> None:
        for line, trained in zip(self._lines, reports, strict=True):
            await line.announce(trained)

    async def announce(self, published: Published) -> None:
        for line in self._lines:
            await line.announce(published)

    def acknowledged(self, next_batch: int) -> bool:
        return all(line.acknowledged_batches() >= next_batch for line in self._lines)

    async def flushed(self) -> None:
        for line in self._lines:
            await line.flushed()

    # --- received ------------------------------------------------------------------------------------------------------

    async def _heard(self, line: BrokerLine, answer: Answer) -> None:
        """A broker has answered the last request, or the next part of its share has come."""
        # A line is asked only in a round.
        assert self._round is not None
        begins_again = self._round.hear(line.number, answer)
        self._hand_over(self._round)
        if begins_again:
            again = [each for each in self._lines if isinstance(self._round.answer(each.number), BatchAnnounced)]
            # All of them at once: a part that comes meanwhile is not the first one.
            for each in again:
                each.begin_again()
            for each in again:
                await each.ask_for_parts()
        # At the end all brokers end by themselves, and broker 0 only after the last evaluation.
        if self._round.end is not None and self._round.index < self._num_batches:
            await self._stop_the_others(self._round, self._round.end)

    async def _stop_the_others(self, round_: BatchRound, end: EndOfRun) -> None:
        ended = next(line for line in self._lines if round_.answer(line.number) is end)
        for line in self._lines:
            if round_.waits_for(line.number):
                await line.stop(f"broker {ended.number} has ended the run: {end.reason}")

    async def part_taken(self) -> None:
        if self._round is None:
            return
        broker = self._round.took()
        self._hand_over(self._round)
        if broker is not None:
            await self._lines[broker].part_taken()

    def _hand_over(self, round_: BatchRound) -> None:
        try:
            ready = round_.ready()
        except ValueError as error:
            raise ServiceError(f"the brokers' shares of batch {round_.index} do not make one batch: {error}") from error
        for answer in ready:
            self._arrived(answer)

    # --- repeated ------------------------------------------------------------------------------------------------------

    async def repeat(self, not_ready: Callable[[str], None]) -> None:
        for line in self._lines:
            # A person must see that the broker refuses this learner's key.
            if line.refused:
                not_ready(f"broker {line.number}: {line.refused}")
            await line.ask_again()
            await line.ask_for_silent_parts()

    async def beat(self, heartbeat: Heartbeat) -> None:
        self._follow_first()
        for line in self._lines:
            await line.send(heartbeat)

    def _follow_first(self) -> None:
        """Who is cut off from broker 0 keeps no place at the others: another learner that broker 0 admits needs all."""
        first, *others = self._lines
        # At the end of a run broker 0 ends when it is done, and the others still have to hear of it.
        has_ended = self._round is not None and isinstance(self._round.answer(first.number), EndOfRun)
        quiet = first.silent_s > WITHOUT_FIRST_S and not has_ended
        if any(line.is_open for line in others) and quiet != self._is_quiet:
            self._is_quiet = quiet
            log.info("quiet_without_broker_0" if quiet else "broker_0_is_back", silent_s=round(first.silent_s, 1))
        for line in others:
            line.be_quiet(quiet=quiet)

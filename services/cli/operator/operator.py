"""Asks the broker of a run for its status, to stop the run, or to requeue what it has quarantined."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import zmq.asyncio

from gspo_protocol.channels import BATCH
from gspo_protocol.messages import RequeueRequest, Status, StatusRequest, StopRequest
from gspo_protocol.sessions import new_session, session_tag
from gspo_services.broker.store import MARK_FILE, read_mark
from gspo_services.shared.net import PeerClient, Security
from gspo_services.shared.runtime.clock import Clock, MonotonicClock
from gspo_services.shared.runtime.errors import ConfigurationError, EndpointError, ServiceError, flatten
from gspo_services.shared.settings import Settings, run_fingerprint

ASK_AGAIN_S: Final = 1.0


class NoAnswer(RuntimeError):
    """The broker did not answer in time."""


class TurnedAway(NoAnswer):
    """The broker, or our own configuration, does not let us ask: another run, release or key. The text says what to do."""


class Operator:
    """A connection to a run's broker, to ask it questions."""

    def __init__(self, client: PeerClient, endpoint: str, directory: Path) -> None:
        """``directory``: of the run, if it is on this machine."""
        self._client = client
        self._endpoint = endpoint
        self._directory = directory

    async def status(self, timeout_s: float) -> dict[str, Any]:
        """Return the broker's status. Raises: NoAnswer."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._ask()
        except TimeoutError as error:
            raise self._silence(timeout_s) from error

    async def status_if_connected(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the broker's status; None if it is not connected, or does not answer in time."""
        if not self._client.connected:
            return None
        # A late answer to an earlier question is out of date.
        while not self._client.inbox.empty():
            self._client.inbox.get_nowait()
        await self._client.send(StatusRequest())
        try:
            async with asyncio.timeout(timeout_s):
                return await self._answer()
        except TimeoutError:
            return None

    async def stop(self, reason: str, timeout_s: float) -> dict[str, Any]:
        """Ask until the broker says that the run is stopping. Returns its status then. Raises: NoAnswer."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    await self._welcome()
                    await self._client.send(StopRequest(reason=reason))
                    status = await self._ask()
                    if status["stopping"] or status["finished"]:
                        return status
        except TimeoutError as error:
            raise self._silence(timeout_s) from error

    async def requeue(self, batches: Sequence[int], timeout_s: float) -> None:
        """Ask the broker to requeue batches. Whether it did is seen in the ledger. Raises: NoAnswer."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._welcome()
                await self._client.send(RequeueRequest(batches=list(batches)))
                await self._ask()
        except TimeoutError as error:
            raise self._silence(timeout_s) from error

    def _silence(self, timeout_s: float) -> NoAnswer:
        if self._client.refused:
            return TurnedAway(self._client.refused)
        return NoAnswer(f"{self._endpoint}: no answer within {timeout_s:g} s")

    async def _welcome(self) -> None:
        welcome = await self._client.connected_welcome()
        mark = None
        with suppress(OSError):
            mark = read_mark(self._directory / MARK_FILE)
        # A restored run has the endpoints of the one that was backed up.
        if mark is not None and mark.run_id != welcome.run_id:
            raise TurnedAway(
                f"{self._endpoint}: run {welcome.run_id} answers, and {self._directory} has run {mark.run_id}: it was "
                "restored or begun anew, and its own broker does not run there. Name the directory of the run that answers, "
                "or start this one with another broker.batch_endpoint"
            )

    async def _ask(self) -> dict[str, Any]:
        await self._welcome()
        while True:
            await self._client.send(StatusRequest())
            try:
                async with asyncio.timeout(ASK_AGAIN_S):
                    return await self._answer()
            except TimeoutError:
                continue  # a request may be lost

    async def _answer(self) -> dict[str, Any]:
        while True:
            message = (await self._client.inbox.get()).message
            if isinstance(message, Status):
                return message.status


@asynccontextmanager
async def connection(settings: Settings, clock: Clock) -> AsyncIterator[Operator]:
    """Connect to the broker of ``settings``, whose ledger is in ``run.directory``, or on another machine.

    Raises: EndpointError, ConfigurationError; ServiceError, in a group and also from the block, when the broker refuses us.
    """
    context = zmq.asyncio.Context()
    session = new_session()
    try:
        client = PeerClient(
            context,
            BATCH,
            settings.broker.batch_endpoint,
            role="operator",
            peer=f"operator-{session_tag(session)}",
            session=session,
            clock=clock,
            # A broker of another run on this port must not be taken for ours.
            fingerprint=run_fingerprint(settings),
            security=Security.load(settings.security, "operator"),
        )
        async with client.running(name="operator"):
            yield Operator(client, settings.broker.batch_endpoint, settings.run.directory)
    finally:
        context.destroy(linger=0)


@asynccontextmanager
async def operator(settings: Settings, clock: Clock | None = None) -> AsyncIterator[Operator]:
    """Open a ``connection`` for one question. Raises: NoAnswer, also from the block, when a broker refuses us."""
    try:
        async with connection(settings, MonotonicClock() if clock is None else clock) as connected:
            yield connected
    except (EndpointError, ConfigurationError) as error:
        raise TurnedAway(str(error)) from error
    except ExceptionGroup as group:
        first = flatten(group)[0]
        if isinstance(first, NoAnswer):
            raise type(first)(str(first)) from group
        if isinstance(first, ServiceError):
            raise TurnedAway(str(first)) from group
        raise

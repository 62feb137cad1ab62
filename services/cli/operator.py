"""Asks a run's broker for its status, to stop the run, or to release what it has set aside, for the ``gspo`` commands."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import zmq.asyncio

from protocol.channels import BATCH
from protocol.messages import ReleaseRequest, Status, StatusRequest, StopRequest
from protocol.sessions import new_session, session_tag
from services.runtime.clock import Clock, MonotonicClock
from services.runtime.errors import ConfigurationError, EndpointError, ServiceError, flatten
from services.runtime.net import PeerClient, Security
from services.runtime.settings import Settings, run_fingerprint

ASK_AGAIN_S: Final = 1.0


class NoAnswer(RuntimeError):
    """The broker did not answer in time."""


class TurnedAway(NoAnswer):
    """The broker, or our own configuration, does not let us ask: another run, release or key. The text says what to do."""


class Operator:
    """A connection to the broker, for questions."""

    def __init__(self, client: PeerClient, endpoint: str) -> None:
        self._client = client
        self._endpoint = endpoint

    async def status(self, timeout_s: float) -> dict[str, Any]:
        """The broker's status. Raises: NoAnswer."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._ask()
        except TimeoutError as error:
            raise self._silence(timeout_s) from error

    async def status_if_connected(self, timeout_s: float) -> dict[str, Any] | None:
        """The broker's status; None when it is not connected, or does not answer in time."""
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
                    await self._client.connected_welcome()
                    await self._client.send(StopRequest(reason=reason))
                    status = await self._ask()
                    if status["stopping"] or status["finished"]:
                        return status
        except TimeoutError as error:
            raise self._silence(timeout_s) from error

    async def release(self, batches: Sequence[int], timeout_s: float) -> None:
        """Ask the broker to give batches back. Whether it did is seen in the ledger. Raises: NoAnswer."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._client.connected_welcome()
                await self._client.send(ReleaseRequest(batches=list(batches)))
                await self._ask()
        except TimeoutError as error:
            raise self._silence(timeout_s) from error

    def _silence(self, timeout_s: float) -> NoAnswer:
        if self._client.refused:
            return TurnedAway(self._client.refused)
        return NoAnswer(f"{self._endpoint}: no answer within {timeout_s:g} s")

    async def _ask(self) -> dict[str, Any]:
        await self._client.connected_welcome()
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
    """A connection to the broker of ``settings``.

    Raises: EndpointError, ConfigurationError; ServiceError, in a group and also from the block, when the broker refuses us.
    """
    context = zmq.asyncio.Context()
    endpoint, session = settings.broker.batch_endpoint, new_session()
    try:
        client = PeerClient(
            context,
            BATCH,
            endpoint,
            role="operator",
            peer=f"operator-{session_tag(session)}",
            session=session,
            clock=clock,
            # Another run's broker on this port must not be taken for ours.
            fingerprint=run_fingerprint(settings),
            security=Security.load(settings.security, "operator"),
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                talking = tasks.create_task(client.run(), name="operator")
                try:
                    yield Operator(client, endpoint)
                finally:
                    talking.cancel()
        finally:
            client.close()
    finally:
        context.destroy(linger=0)


@asynccontextmanager
async def operator(settings: Settings, clock: Clock | None = None) -> AsyncIterator[Operator]:
    """A ``connection`` for one question. Raises: NoAnswer, also from the block, when the broker refuses us."""
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

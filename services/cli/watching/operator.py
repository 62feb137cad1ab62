"""Asks a run's broker for its status, or to stop: what `gspo doctor` and `gspo stop` have in common."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import zmq.asyncio

from protocol.channels import BATCH
from protocol.messages import Status, StatusRequest, StopRequest
from services.runtime.clock import Clock, MonotonicClock
from services.runtime.lifecycle import ServiceError, flatten
from services.runtime.net.channel import EndpointError
from services.runtime.net.peer import PeerClient
from services.runtime.net.security import Security
from services.runtime.settings.configuration import ConfigurationError
from services.runtime.settings.fingerprint import run_fingerprint
from services.runtime.settings.sections import Settings

ASK_AGAIN_S: Final = 1.0


class NoAnswer(RuntimeError):
    """The broker did not answer in time."""


class TurnedAway(NoAnswer):
    """The broker, or our own configuration, does not let us ask: another run, release or key. The text has the way out."""


class Operator:
    """One conversation with the broker. Its methods raise NoAnswer."""

    def __init__(self, client: PeerClient, endpoint: str) -> None:
        self._client = client
        self._endpoint = endpoint

    async def status(self, timeout_s: float) -> dict[str, Any]:
        """The broker's status."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._ask()
        except TimeoutError as error:
            raise self._silence(timeout_s) from error

    async def stop(self, reason: str, timeout_s: float) -> dict[str, Any]:
        """Ask until the broker says that the run stops; returns its status then."""
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
                    while True:
                        message = (await self._client.inbox.get()).message
                        if isinstance(message, Status):
                            return message.status
            except TimeoutError:
                continue  # a request may be lost


@asynccontextmanager
async def operator(settings: Settings, clock: Clock | None = None) -> AsyncIterator[Operator]:
    """A conversation with the broker of ``settings``. Raises: NoAnswer, also from the block, when it turns us away."""
    context = zmq.asyncio.Context()
    endpoint = settings.broker.batch_endpoint
    try:
        client = PeerClient(
            context,
            BATCH,
            endpoint,
            role="operator",
            peer=f"operator-{uuid.uuid4().hex[:8]}",
            session=uuid.uuid4().hex,
            clock=MonotonicClock() if clock is None else clock,
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
    except (EndpointError, ConfigurationError) as error:
        raise TurnedAway(str(error)) from error
    except ExceptionGroup as group:
        first = flatten(group)[0]
        if isinstance(first, NoAnswer):
            raise type(first)(str(first)) from group
        if isinstance(first, ServiceError):
            raise TurnedAway(str(first)) from group
        raise
    finally:
        context.destroy(linger=0)

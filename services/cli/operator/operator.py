"""Asks every broker of a run, and merges the answers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import zmq.asyncio

from gspo_protocol.channels import BATCH
from gspo_protocol.sessions import new_session, session_tag
from gspo_services.cli.operator.line import NoAnswer, OperatorLine, TurnedAway
from gspo_services.runs.ledgers import ledger_directory
from gspo_services.shared.net import PeerClient, Security
from gspo_services.shared.runtime.clock import Clock, MonotonicClock
from gspo_services.shared.runtime.errors import ConfigurationError, EndpointError, ServiceError, flatten
from gspo_services.shared.settings import Settings, run_fingerprint


class Operator:
    """A connection to every broker of a run, to ask questions."""

    def __init__(self, lines: Sequence[OperatorLine]) -> None:
        """``lines``: to the brokers, in their order."""
        self._lines = tuple(lines)

    async def status(self, timeout_s: float) -> dict[str, Any]:
        """Return the run's status, from all brokers that answer. Raises: NoAnswer when none does; TurnedAway."""
        answers = await self._asked(lambda line: line.status(timeout_s))
        errors = [each for each in answers if isinstance(each, NoAnswer)]
        refusal = next((each for each in errors if isinstance(each, TurnedAway)), None)
        if refusal is not None:
            raise refusal
        status = _status_of([None if isinstance(each, NoAnswer) else each for each in answers])
        if status is None:
            raise errors[0]
        return status

    async def status_if_connected(self, timeout_s: float) -> dict[str, Any] | None:
        """The run's status; None when no broker is connected, or none answers in time."""
        return _status_of(await asyncio.gather(*(line.status_if_connected(timeout_s) for line in self._lines)))

    async def stop(self, reason: str, timeout_s: float) -> dict[str, Any]:
        """Ask until every broker says that the run is stopping. Returns its status then.

        Raises: NoAnswer, after all were asked; it names those that did not answer.
        """
        answers = await self._asked(lambda line: line.stop(reason, timeout_s))
        self._require_all(answers)
        status = _status_of([each for each in answers if not isinstance(each, NoAnswer)])
        assert status is not None
        return status

    async def requeue(self, batches: Sequence[Sequence[int]], timeout_s: float) -> None:
        """Ask each broker to requeue its batches, by its place in ``batches``; one that has none is not asked.

        Whether they did is seen in the ledgers. Raises: NoAnswer.
        """
        asked = [number for number, own in enumerate(batches) if own]
        asking = (self._lines[number].requeue(batches[number], timeout_s) for number in asked)
        answers = dict(zip(asked, await self._gathered(asking), strict=True))
        self._require_all([answers.get(number) for number in range(len(self._lines))])

    async def _asked(self, ask: Callable[[OperatorLine], Awaitable[Any]]) -> list[Any]:
        return await self._gathered(ask(line) for line in self._lines)

    async def _gathered(self, asking: Iterable[Awaitable[Any]]) -> list[Any]:
        """Return each broker's answer, or the NoAnswer that it raised."""
        answers = await asyncio.gather(*asking, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, NoAnswer):
                raise answer
        return answers

    def _require_all(self, answers: Sequence[Any]) -> None:
        """``answers``: by broker."""
        errors = {number: each for number, each in enumerate(answers) if isinstance(each, NoAnswer)}
        if not errors:
            return
        first = next((each for each in errors.values() if isinstance(each, TurnedAway)), next(iter(errors.values())))
        if len(self._lines) == 1:
            raise first
        silent = ", ".join(f"broker {number}" for number in errors)
        text = f"{silent} of {len(self._lines)} did not agree, the others did: ask again when it runs ({first})"
        raise type(first)(text) from first


def _status_of(answers: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """The run's status, from each broker's in their order, None of one that does not answer; None when none does."""
    if len(answers) == 1:
        return answers[0]
    from gspo_services.cli.several import merged_status

    return merged_status(answers)


@asynccontextmanager
async def connection(settings: Settings, clock: Clock) -> AsyncIterator[Operator]:
    """Connect to the brokers of ``settings``, whose ledgers are in ``run.directory``, or on other machines.

    Raises: EndpointError, ConfigurationError; ServiceError, in a group and also from the block, when a broker refuses us.
    """
    context = zmq.asyncio.Context()
    session = new_session()
    clients: list[PeerClient] = []
    try:
        endpoints = settings.broker.batch_endpoints
        for endpoint in endpoints:
            clients.append(
                PeerClient(
                    context,
                    BATCH,
                    endpoint,
                    role="operator",
                    peer=f"operator-{session_tag(session)}",
                    session=session,
                    clock=clock,
                    # A broker of another run on this port must not be taken for ours.
                    fingerprint=run_fingerprint(settings),
                    security=Security.load(settings.security, "operator"),
                )
            )
        async with asyncio.TaskGroup() as tasks:
            talking = [tasks.create_task(client.run(), name="operator") for client in clients]
            try:
                yield Operator(
                    [
                        OperatorLine(*each, number, ledger_directory(settings.run.directory, number))
                        for number, each in enumerate(zip(clients, endpoints, strict=True))
                    ]
                )
            finally:
                for task in talking:
                    task.cancel()
    finally:
        for client in clients:
            client.close()
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

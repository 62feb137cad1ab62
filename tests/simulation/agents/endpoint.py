"""The agents' endpoint without HTTP: calls take time to arrive, connections break, and answers are lost on their way."""

import asyncio
import random
from collections import Counter
from contextlib import aclosing

from gspo_services.rollout.endpoint import CallAnswer, CallRefused, CallRequest
from gspo_services.rollout.episodes import EpisodeRegistry

BREAKS = 0.1
"""How often a connection breaks before the answer is complete, or the answer is lost behind it."""


class SimEndpoint:
    """The way from an agent to the calls of its episode."""

    def __init__(self, registry: EpisodeRegistry, rng: random.Random, happened: Counter[str]) -> None:
        self._registry = registry
        self._rng = rng
        self._happened = happened
        self._closed = False
        self._open: list[asyncio.Timeout] = []

    async def stop(self) -> None:
        """Refuse what comes, and end the calls under way."""
        self._closed = True
        for call in self._open:
            if not call.expired():
                call.reschedule(asyncio.get_running_loop().time())

    async def delay(self) -> None:
        """A request is on its way."""
        await asyncio.sleep(self._rng.uniform(0.0, 0.02))

    async def ask(self, key: str, request: CallRequest) -> CallAnswer:
        """The answer; whoever gets none asks again. Raises: CallRefused."""
        while True:
            if self._closed:
                raise CallRefused(503, "draining", "the rollout ends")
            answer = await self._asked_once(key, request)
            if answer is not None:
                return answer
            if not self._closed:
                self._happened["call asked again"] += 1
            await self.delay()

    async def _asked_once(self, key: str, request: CallRequest) -> CallAnswer | None:
        """None: the connection broke."""
        breaks = self._rng.random() < BREAKS
        loses_answer = breaks and self._rng.random() < 0.5
        lasts_s = self._rng.uniform(0.0, 0.5) if breaks and not loses_answer else None
        answer = None
        connection = asyncio.timeout(lasts_s)
        try:
            async with connection:
                self._open.append(connection)
                async with aclosing(self._registry.calls_of(key).call(request)) as pieces:
                    async for piece in pieces:
                        if isinstance(piece, CallAnswer):
                            answer = piece
                            if loses_answer:
                                return None
        except TimeoutError:
            return None
        finally:
            self._open.remove(connection)
        return answer

"""The other ranks' parts of a version as rank 0 sees them: what they are, and chunks for rollouts that reach only it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import Final

import structlog
import zmq.asyncio

from gspo_protocol.channels import WEIGHTS
from gspo_protocol.codec import Array
from gspo_protocol.messages import PartReady, PartRequest, WeightChunk, WeightGone, WeightRequest
from gspo_protocol.sessions import new_session
from gspo_services.shared.net import Delivered, PeerClient, Security
from gspo_services.shared.runtime.clock import Clock

log = structlog.get_logger()

ASK_AGAIN_S: Final = 1.0
SILENCE_S: Final = 5.0
"""A rank that sends nothing for so long sends nothing of what was asked for."""
Answer = tuple[WeightChunk | WeightGone, dict[str, Array]]


class OtherRanks:
    """The ranks of this learner but rank 0.

    produces:     their parts of a version; chunks
    waits for:    their weight servers
    unblocked by: PartReady, WeightChunk, WeightGone; SILENCE_S
    """

    def __init__(self, context: zmq.asyncio.Context, *, security: Security, clock: Clock) -> None:
        self._context = context
        self._security = security
        self._clock = clock
        self._ranks: list[_Rank] = []
        self.endpoints: Sequence[str] = ()
        """Where rollouts find them, in the order of ranks."""

    def connect(self, endpoints: Sequence[str], tasks: asyncio.TaskGroup) -> None:
        """Connect, once, and have ``tasks`` keep the connections until they are cancelled. Raises: EndpointError."""
        self.endpoints = endpoints
        for number, endpoint in enumerate(endpoints, start=1):
            client = PeerClient(
                self._context, WEIGHTS, endpoint,
                role="learner", peer="learner", session=new_session(), clock=self._clock, security=self._security,
            )  # fmt: skip
            rank = _Rank(number, client)
            self._ranks.append(rank)
            tasks.create_task(client.run(), name=f"rank-{number}")
            tasks.create_task(rank.read(), name=f"rank-{number}-answers")

    async def parts(self, policy_version: int) -> list[Delivered]:
        """Return each rank's PartReady of a version, in the order of ranks. Waits without limit: a rank that has died ends
        the learner, which is seen where it trains."""
        return list(await asyncio.gather(*(rank.part(policy_version) for rank in self._ranks)))

    async def chunks(self, request: WeightRequest) -> AsyncGenerator[Answer, None]:
        """Yield the chunks that a rollout asks rank 0 for and that another rank has; nothing where that rank is silent."""
        if request.part <= len(self._ranks):
            async with aclosing(self._ranks[request.part - 1].chunks(request)) as answers:
                async for answer in answers:
                    yield answer


class _Rank:
    """One connection, over which one request for chunks is under way at a time."""

    def __init__(self, number: int, client: PeerClient) -> None:
        self._number = number
        self._client = client
        self._parts: asyncio.Queue[Delivered] = asyncio.Queue()
        self._chunks: asyncio.Queue[Answer] = asyncio.Queue()
        self._one_at_a_time = asyncio.Lock()

    async def read(self) -> None:
        """Sort what comes, until cancelled."""
        while True:
            delivered = await self._client.inbox.get()
            if isinstance(delivered.message, PartReady):
                self._parts.put_nowait(delivered)
            elif isinstance(delivered.message, WeightChunk | WeightGone):
                self._chunks.put_nowait((delivered.message, delivered.arrays))

    async def part(self, policy_version: int) -> Delivered:
        while True:
            await self._client.connected_welcome()
            await self._client.send(PartRequest(policy_version=policy_version))
            with suppress(TimeoutError):
                async with asyncio.timeout(ASK_AGAIN_S):
                    while True:
                        delivered = await self._parts.get()
                        if isinstance(delivered.message, PartReady) and delivered.message.policy_version == policy_version:
                            return delivered

    async def chunks(self, request: WeightRequest) -> AsyncGenerator[Answer, None]:
        async with self._one_at_a_time:
            while not self._chunks.empty():
                self._chunks.get_nowait()  # Late answers to an earlier request.
            left = request.num_chunks
            own = WeightRequest(
                policy_version=request.policy_version,
                base_version=request.base_version,
                first_chunk=request.first_chunk,
                num_chunks=request.num_chunks,
            )
            try:
                async with asyncio.timeout(SILENCE_S):
                    await self._client.send(own)
                while left:
                    async with asyncio.timeout(SILENCE_S):
                        message, arrays = await self._chunks.get()
                    if isinstance(message, WeightGone):
                        yield message, arrays
                        return
                    if (message.policy_version, message.base_version) == (own.policy_version, own.base_version):
                        left -= 1
                        passed = WeightChunk(
                            policy_version=message.policy_version,
                            base_version=message.base_version,
                            chunk=message.chunk,
                            part=request.part,
                        )
                        yield passed, arrays
            except TimeoutError:
                log.warning("part_not_passed_on", rank=self._number, policy_version=request.policy_version)

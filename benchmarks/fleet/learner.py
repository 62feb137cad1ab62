"""A learner that trains nothing: it takes each batch with all its parts, and announces the next version."""

import asyncio

import zmq.asyncio

from protocol.channels import BATCH
from protocol.limits import MAX_VOCABULARY
from protocol.messages import Batch, BatchPart, BatchRequest, Checkpointed, Published, Resume, Trained
from services.learner.broker.parts import PartStream
from services.runtime.clock import Clock
from services.runtime.net import PeerClient

ASK_AGAIN_S = 1.0


class FakeLearner:
    """Counts what it takes; ``run`` until cancelled."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, clock: Clock) -> None:
        self.peer = PeerClient(context, BATCH, endpoint, role="learner", peer="learner", session="s-learner", clock=clock)
        self.num_batches = 0
        self.num_tokens = 0

    async def run(self) -> None:
        """Take batch after batch."""
        async with self.peer.running("learner"):
            await self.peer.connected_welcome()
            await self.peer.send(Resume(next_batch=0))
            await self._publish()
            while True:
                await self._take(self.num_batches)
                self.num_batches += 1
                await self._publish()
                done = {"policy_version": self.num_batches + 1}
                await self.peer.send(Trained(index=self.num_batches - 1, metrics={"loss": 0.5}, **done))
                await self.peer.send(Checkpointed(next_batch=self.num_batches, **done))

    async def _publish(self) -> None:
        await self.peer.send(
            Published(
                policy_version=self.num_batches + 1,
                endpoint="tcp://127.0.0.1:1",
                digest="d",
                num_bytes=1,
                trained_batches=self.num_batches,
                vocabulary=MAX_VOCABULARY,
            )
        )

    async def _take(self, index: int) -> None:
        parts: PartStream | None = None
        while parts is None or not parts.complete:
            asked = BatchRequest(index=index, policy_version=index + 1) if parts is None else parts.request()
            if asked is not None:
                await self.peer.send(asked)
            try:
                async with asyncio.timeout(ASK_AGAIN_S):
                    delivered = await self.peer.inbox.get()
            except TimeoutError:
                if parts is not None:
                    parts.ask_again()
                continue
            match delivered.message:
                case Batch() as batch if batch.index == index and parts is None:
                    parts = PartStream(batch)
                case BatchPart() as part if parts is not None and parts.offer(part, delivered.arrays):
                    parts.took()
                    self.num_tokens += len(delivered.arrays["token_ids"])

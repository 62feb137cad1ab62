"""A learner that trains nothing: it takes each batch with all its parts, and announces the next version."""

import asyncio

import zmq.asyncio

from gspo_protocol.channels import BATCH
from gspo_protocol.limits import MAX_VOCABULARY
from gspo_protocol.messages import Batch, BatchPart, BatchRequest, Checkpointed, Published, Resume, Trained
from gspo_services.learner.broker.parts import PartStream
from gspo_services.shared.net import PeerClient
from gspo_services.shared.runtime.clock import Clock

ASK_AGAIN_S = 1.0


class FakeLearner:
    """Counts what it takes; ``run`` until cancelled."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, clock: Clock, *, num_metrics: int = 1) -> None:
        """``num_metrics``: of each batch; a real learner's are some 200."""
        self._metrics = {f"metric_{number}": 0.5 / (number + 1) for number in range(num_metrics)}
        self._peer = PeerClient(context, BATCH, endpoint, role="learner", peer="learner", session="s-learner", clock=clock)
        self.num_batches = 0
        self.num_tokens = 0

    async def run(self) -> None:
        """Take batch after batch."""
        async with self._peer.running("learner"):
            await self._peer.connected_welcome()
            await self._peer.send(Resume(next_batch=0))
            await self._publish()
            while True:
                await self._take(self.num_batches)
                self.num_batches += 1
                await self._publish()
                done = {"policy_version": self.num_batches + 1}
                await self._peer.send(Trained(index=self.num_batches - 1, metrics=self._metrics, **done))
                await self._peer.send(Checkpointed(next_batch=self.num_batches, **done))

    async def _publish(self) -> None:
        published = Published(
            policy_version=self.num_batches + 1,
            endpoint="tcp://127.0.0.1:1",
            digest="d",
            num_bytes=1,
            trained_batches=self.num_batches,
            vocabulary=MAX_VOCABULARY,
        )
        await self._peer.send(published)

    async def _take(self, index: int) -> None:
        parts: PartStream | None = None
        while parts is None or not parts.complete:
            asked = BatchRequest(index=index, policy_version=index + 1) if parts is None else parts.request()
            if asked is not None:
                await self._peer.send(asked)
            try:
                async with asyncio.timeout(ASK_AGAIN_S):
                    delivered = await self._peer.inbox.get()
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

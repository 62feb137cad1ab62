"""A learner that trains nothing: it takes each batch with all its parts, and announces the next version.

Of several brokers it takes each one's share.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

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

    def __init__(
        self, context: zmq.asyncio.Context, endpoints: Sequence[str], clock: Clock, *, num_metrics: int = 1
    ) -> None:
        """``num_metrics``: of each batch; a real learner's are some 200."""
        self._metrics = {f"metric_{number}": 0.5 / (number + 1) for number in range(num_metrics)}
        self._peers = [
            PeerClient(context, BATCH, endpoint, role="learner", peer="learner", session="s-learner", clock=clock)
            for endpoint in endpoints
        ]
        self.num_batches = 0
        self.num_tokens = 0

    async def run(self) -> None:
        """Take batch after batch."""
        async with AsyncExitStack() as stack:
            for peer in self._peers:
                await stack.enter_async_context(peer.running("learner"))
                await peer.connected_welcome()
                await peer.send(Resume(next_batch=0))
            await self._publish()
            while True:
                for peer in self._peers:
                    await self._take(peer, self.num_batches)
                self.num_batches += 1
                await self._publish()
                done = {"policy_version": self.num_batches + 1}
                for peer in self._peers:
                    await peer.send(Trained(index=self.num_batches - 1, metrics=self._metrics, **done))
                    await peer.send(Checkpointed(next_batch=self.num_batches, **done))

    async def _publish(self) -> None:
        published = Published(
            policy_version=self.num_batches + 1,
            endpoint="tcp://127.0.0.1:1",
            digest="d",
            num_bytes=1,
            trained_batches=self.num_batches,
            vocabulary=MAX_VOCABULARY,
        )
        for peer in self._peers:
            await peer.send(published)

    async def _take(self, peer: PeerClient, index: int) -> None:
        parts: PartStream | None = None
        while parts is None or not parts.complete:
            asked = BatchRequest(index=index, policy_version=index + 1) if parts is None else parts.request()
            if asked is not None:
                await peer.send(asked)
            try:
                async with asyncio.timeout(ASK_AGAIN_S):
                    delivered = await peer.inbox.get()
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

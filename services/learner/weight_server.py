"""The weight channel's binding end: serves manifests and chunks of the versions that the learner holds."""

import structlog

from protocol.channels import WEIGHTS
from protocol.codec import message_type
from protocol.limits import MAX_PEERS, MAX_REASON_CHARS, PROTOCOL_VERSION
from protocol.messages import (
    Goodbye,
    Hello,
    Loaded,
    ManifestRequest,
    Message,
    Refused,
    WeightChunk,
    WeightGone,
    WeightRequest,
    Welcome,
)
from services.learner.metrics import LearnerMetrics
from services.learner.snapshot import SnapshotStore
from services.runtime.channel import Incoming, RouterChannel
from services.runtime.peer import UNKNOWN_SESSION

log = structlog.get_logger()


class WeightServer:
    """Answers the rollouts' requests for weights.

    produces:     Manifest, WeightChunk, WeightGone
    waits for:    requests: each names the chunks it wants, which is the credit of its sender
    unblocked by: the next request; a chunk that finds the peer's queue full is asked for again
    """

    def __init__(self, channel: RouterChannel, store: SnapshotStore, metrics: LearnerMetrics) -> None:
        self._channel = channel
        self._store = store
        self._metrics = metrics
        # By identity and key: an identity is what its sender says, a key is what it proved.
        self._peers: set[tuple[bytes, bytes]] = set()

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            while True:
                incoming = await self._channel.receive()
                await self._handle(incoming)
        finally:
            self._channel.close()

    async def _handle(self, incoming: Incoming) -> None:
        peer = incoming.peer
        if incoming.received is None:
            self._metrics.messages_refused.labels(channel="weights").inc()
            log.warning("message_refused", channel="weights", peer=peer.decode(errors="replace"), error=incoming.error)
            await self._channel.send(peer, Refused(reason=incoming.error[:MAX_REASON_CHARS]))
            return
        message = incoming.received.message
        if isinstance(message, Hello):
            await self._channel.send(peer, self._greet(incoming, message))
        elif (peer, incoming.key) not in self._peers or not self._channel.admits(incoming):
            reason = f"{UNKNOWN_SESSION}: say hello"
            await self._channel.send(peer, Refused(reason=reason, message_type=message_type(message)))
        elif isinstance(message, ManifestRequest):
            manifest = self._store.manifest_for(message.have_version)
            await self._channel.send(peer, manifest or WeightGone(policy_version=0, newest_version=0))
        elif isinstance(message, WeightRequest):
            await self._send_chunks(peer, message)
        elif isinstance(message, Goodbye):
            self._peers.discard((peer, incoming.key))
        elif isinstance(message, Loaded):
            self._record(peer, message)
        else:
            reason = f"{message_type(message)} does not belong on the weights channel"
            await self._channel.send(peer, Refused(reason=reason, message_type=message_type(message)))

    def _greet(self, incoming: Incoming, hello: Hello) -> Message:
        objection = self._channel.objection(incoming, hello)
        if not objection and hello.role not in WEIGHTS.connects:
            objection = f"a {hello.role} does not belong on the weights channel: check the endpoint"
        if objection:
            self._metrics.messages_refused.labels(channel="weights").inc()
            return Refused(reason=f"hello: {objection}", message_type="hello", fatal=True)
        if hello.protocol_version != PROTOCOL_VERSION:
            return Refused(
                reason=f"protocol version {hello.protocol_version} of {hello.peer} does not match {PROTOCOL_VERSION} of the "
                "learner: run the same release everywhere",
                fatal=True,
            )
        if len(self._peers) >= MAX_PEERS:
            self._peers.clear()  # They say hello again when they next ask: bounded without a clock.
        self._peers.add((incoming.peer, incoming.key))
        newest = self._store.newest
        return Welcome(
            protocol_version=PROTOCOL_VERSION,
            run_id="weights",
            policy_version=newest.policy_version if newest else 0,
        )

    async def _send_chunks(self, peer: bytes, request: WeightRequest) -> None:
        parts = self._store.get(request.policy_version, request.base_version)
        newest = self._store.newest
        if parts is None:
            newest_version = newest.policy_version if newest else 0
            await self._channel.send(peer, WeightGone(policy_version=request.policy_version, newest_version=newest_version))
            return
        last = min(request.first_chunk + request.num_chunks, parts.num_chunks)
        for index in range(request.first_chunk, last):
            data = parts.chunk(index)
            chunk = WeightChunk(policy_version=request.policy_version, base_version=request.base_version, chunk=index)
            if not await self._channel.send(peer, chunk, {"data": data}):
                return
            self._metrics.weight_bytes_sent.inc(data.nbytes)

    def _record(self, peer: bytes, loaded: Loaded) -> None:
        name = peer.decode(errors="replace")
        if loaded.error:
            self._metrics.weight_loads_failed.inc()
            log.error("weights_not_loaded", peer=name, policy_version=loaded.policy_version, error=loaded.error)
        else:
            self._metrics.weight_loads.inc()
            log.info("weights_loaded", peer=name, policy_version=loaded.policy_version, pause_s=round(loaded.pause_s, 3))

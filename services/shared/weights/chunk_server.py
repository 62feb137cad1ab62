"""Serves versions in chunks: the learner to rollouts on the weight channel, and a rollout to other rollouts."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog

from gspo_protocol.channels import ChannelSpec
from gspo_protocol.codec import message_type
from gspo_protocol.limits import MAX_PEERS, MAX_REASON_CHARS, PROTOCOL_VERSION
from gspo_protocol.messages import (
    Goodbye,
    Hello,
    Loaded,
    Manifest,
    ManifestRequest,
    Message,
    Refused,
    WeightChunk,
    WeightGone,
    WeightRequest,
    Welcome,
)
from gspo_protocol.releases import other_release
from gspo_protocol.sessions import shown_identity
from gspo_services.shared.net import UNKNOWN_SESSION, Incoming, RouterChannel

log = structlog.get_logger()


Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, kw_only=True)
class Parts(ABC):
    """Bytes that are fetched in chunks."""

    manifest: Manifest

    @property
    def policy_version(self) -> int:
        return self.manifest.policy_version

    @property
    def num_bytes(self) -> int:
        """How many are here: all, or one part."""
        return self.manifest.num_bytes

    @property
    def num_chunks(self) -> int:
        return -(-self.num_bytes // self.manifest.chunk_bytes)

    def chunk(self, index: int) -> Bytes:
        """Bytes of chunk ``index``: uint8 [chunk_bytes], the last one shorter. They never change."""
        begin = index * self.manifest.chunk_bytes
        return self.read(begin, min(begin + self.manifest.chunk_bytes, self.num_bytes))

    @abstractmethod
    def read(self, begin: int, end: int) -> Bytes:
        """Bytes from ``begin`` to ``end``, which never change."""


@dataclass(frozen=True, kw_only=True)
class StoredParts(Parts):
    """``data``: uint8 [num_bytes], all bytes that are here in a row."""

    data: Bytes

    @property
    def num_bytes(self) -> int:
        return len(self.data)

    def read(self, begin: int, end: int) -> Bytes:
        return self.data[begin:end]


class ChunkServer(ABC):
    """Answers requests for weights; the subclass decides which versions are available.

    produces:     Manifest, WeightChunk, WeightGone
    waits for:    requests; each names the chunks that it wants, which is the sender's credit
    unblocked by: the next request; when the peer's queue is full a chunk is dropped, and the peer asks for it again
    """

    def __init__(
        self, channel: RouterChannel, spec: ChannelSpec, *, refused: Callable[[], None], sent: Callable[[int], None]
    ) -> None:
        """``refused`` counts the messages that are not accepted, ``sent`` the bytes of weights."""
        self._channel = channel
        self._spec = spec
        self._refused = refused
        self._sent = sent
        # By identity and key: a sender claims its identity, and proves its key.
        self._peers: set[tuple[bytes, bytes]] = set()

    @property
    def endpoint(self) -> str:
        """The address at which the server is bound."""
        return self._channel.endpoint

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            while True:
                incoming = await self._channel.receive()
                await self._handle(incoming)
        finally:
            self._channel.close()

    def close(self) -> None:
        """Close, even if ``run`` never began. A second call does nothing."""
        self._channel.close()

    # --- available versions ------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def newest_version(self) -> int:
        """The newest version that can be fetched; 0: none."""

    @abstractmethod
    def manifest_for(self, incoming: Incoming, request: ManifestRequest) -> Manifest | None:
        """The snapshot or delta that the sender should fetch next; None: no version is available."""

    @abstractmethod
    def parts(self, incoming: Incoming, request: WeightRequest) -> Parts | None:
        """The version or delta whose chunks are requested; None: not available (any more)."""

    @abstractmethod
    def on_loaded(self, incoming: Incoming, loaded: Loaded) -> None:
        """The sender's engine serves a version, or could not load it."""

    # --- messages ------------------------------------------------------------------------------------------------------

    async def _handle(self, incoming: Incoming) -> None:
        peer = incoming.peer
        if incoming.received is None:
            self._refused()
            log.warning("message_refused", channel=self._spec.name, peer=shown_identity(peer), error=incoming.error)
            await self._channel.send(peer, Refused(reason=incoming.error[:MAX_REASON_CHARS]))
            return
        message = incoming.received.message
        if isinstance(message, Hello):
            await self._channel.send(peer, self._greet(incoming, message))
        elif (peer, incoming.key) not in self._peers or not self._channel.admits(incoming):
            reason = f"{UNKNOWN_SESSION}: say hello"
            await self._channel.send(peer, Refused(reason=reason, message_type=message_type(message)))
        elif isinstance(message, ManifestRequest):
            manifest = self.manifest_for(incoming, message)
            await self._channel.send(peer, manifest or WeightGone(policy_version=0, newest_version=0))
        elif isinstance(message, WeightRequest):
            await self.send_chunks(incoming, message)
        elif isinstance(message, Goodbye):
            self._peers.discard((peer, incoming.key))
        elif isinstance(message, Loaded):
            self.on_loaded(incoming, message)
        elif not await self.on_other(incoming, message):
            reason = f"{message_type(message)} does not belong on the {self._spec.name} channel"
            await self._channel.send(peer, Refused(reason=reason, message_type=message_type(message)))

    def _greet(self, incoming: Incoming, hello: Hello) -> Message:
        objection = self._channel.objection(incoming, hello)
        if not objection and hello.role not in self._spec.connects:
            objection = f"a {hello.role} does not belong on the {self._spec.name} channel: check the endpoint"
        if objection:
            self._refused()
            return Refused(reason=f"hello: {objection}", message_type="hello", fatal=True)
        if hello.protocol_version != PROTOCOL_VERSION:
            refusal = other_release(hello, self._spec.binds)
            self._refused()
            log.warning("message_refused", channel=self._spec.name, peer=hello.peer, error=refusal.reason)
            return refusal
        if len(self._peers) >= MAX_PEERS:
            self._peers.clear()  # A bound without a clock: peers say hello again at their next request.
        self._peers.add((incoming.peer, incoming.key))
        return Welcome(protocol_version=PROTOCOL_VERSION, run_id="weights", policy_version=self.newest_version)

    async def on_other(self, incoming: Incoming, message: Message) -> bool:
        """Handle any other message; False: it does not belong here."""
        return False

    async def send_chunks(self, incoming: Incoming, request: WeightRequest) -> None:
        """Send what is here of the chunks that are asked for."""
        parts = self.parts(incoming, request)
        if parts is None:
            gone = WeightGone(policy_version=request.policy_version, newest_version=self.newest_version)
            await self._channel.send(incoming.peer, gone)
            return
        last = min(request.first_chunk + request.num_chunks, parts.num_chunks)
        for index in range(request.first_chunk, last):
            data = parts.chunk(index)
            chunk = WeightChunk(policy_version=request.policy_version, base_version=request.base_version, chunk=index)
            if not await self._channel.send(incoming.peer, chunk, {"data": data}, unchanging=True):
                return
            self._sent(data.nbytes)

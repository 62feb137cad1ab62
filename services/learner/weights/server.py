"""The weight channel's binding end: serves manifests and chunks of the versions that the learner holds."""

import asyncio
from typing import Final

import structlog
from msgspec import structs

from protocol.channels import WEIGHTS
from protocol.codec import message_type
from protocol.messages import (
    BroadcastRequest,
    Loaded,
    Manifest,
    ManifestRequest,
    Message,
    ProcessGroup,
    ProcessGroupRequest,
    Refused,
    Source,
    WeightGone,
    WeightRequest,
)
from protocol.sessions import first_identity, shown_identity
from services.learner.metrics import LearnerMetrics
from services.learner.weights.checksums import PublishedChecksums
from services.learner.weights.fan_out import FanOut
from services.learner.weights.process_groups import SendingGroups
from services.learner.weights.snapshot import SnapshotStore
from services.runtime.net import Incoming, RouterChannel
from services.weights import ChunkServer, Parts

log = structlog.get_logger()

MAX_WAITING: Final = 256
"""ProcessGroup requests that wait for the hashing of a version."""


class WeightServer(ChunkServer):
    """Serves what the store holds; refers late requests to rollouts that have it (services.learner.weights.fan_out)."""

    def __init__(
        self,
        channel: RouterChannel,
        store: SnapshotStore,
        metrics: LearnerMetrics,
        fan_out: FanOut | None = None,
        groups: SendingGroups | None = None,
        checksums: PublishedChecksums | None = None,
    ) -> None:
        """``fan_out``: None: one with the default limits. ``groups``: None: only chunks are sent. ``checksums``: what
        engines must report for the versions in ``store``; None: nothing is known before it is asked for.
        """
        super().__init__(
            channel,
            WEIGHTS,
            refused=metrics.messages_refused.labels(channel="weights").inc,
            sent=metrics.weight_bytes_sent.inc,
        )
        self._store = store
        self._metrics = metrics
        self._fan_out = FanOut() if fan_out is None else fan_out
        self._num_failed = self._fan_out.num_failed
        self._groups = groups
        self._checksums = PublishedChecksums() if checksums is None else checksums
        self._requests: asyncio.Queue[tuple[Incoming, ProcessGroupRequest]] = asyncio.Queue(MAX_WAITING)

    async def run(self) -> None:
        """Serve until cancelled."""
        if self._groups is None:
            await super().run()
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._promise(), name="group-requests")
                await super().run()
        finally:
            self._groups.close()

    @property
    def newest_version(self) -> int:
        newest = self._store.newest
        return newest.policy_version if newest else 0

    def manifest_for(self, incoming: Incoming, request: ManifestRequest) -> Manifest | None:
        manifest = self._store.manifest_for(request.have_version)
        if manifest is not None and request.hash:
            manifest = structs.replace(manifest, checksums=self._checksums.known(manifest.digest, request.hash))
        if manifest is None or manifest.policy_version <= request.have_version:
            return manifest
        source = Source(request.endpoint, incoming.key.decode()) if request.endpoint else None
        item = (manifest.policy_version, manifest.base_version)
        sources = self._fan_out.join(item, first_identity(incoming.peer), source, direct=request.direct)
        self._count_failed()
        return structs.replace(manifest, sources=sources) if sources else manifest

    def parts(self, incoming: Incoming, request: WeightRequest) -> Parts | None:
        self._fan_out.came_back((request.policy_version, request.base_version), first_identity(incoming.peer))
        self._count_failed()
        return self._store.get(request.policy_version, request.base_version)

    def _count_failed(self) -> None:
        self._metrics.weight_sources_failed.inc(self._fan_out.num_failed - self._num_failed)
        self._num_failed = self._fan_out.num_failed

    def on_loaded(self, incoming: Incoming, loaded: Loaded) -> None:
        name = shown_identity(incoming.peer)
        if loaded.error:
            self._metrics.weight_loads_failed.inc()
            log.error("weights_not_loaded", peer=name, policy_version=loaded.policy_version, error=loaded.error)
        else:
            self._metrics.weight_loads.inc()
            log.info("weights_loaded", peer=name, policy_version=loaded.policy_version, pause_s=round(loaded.pause_s, 3))

    # --- process groups ------------------------------------------------------------------------------------------------

    def takes(self, incoming: Incoming, message: Message) -> bool:
        if self._groups is None:
            return False
        if isinstance(message, ProcessGroupRequest):
            if self._requests.full():
                return False
            self._requests.put_nowait((incoming, message))
            return True
        if isinstance(message, BroadcastRequest):
            self._broadcast(incoming, message, self._groups)
            return True
        return False

    async def _promise(self) -> None:
        """Answer group requests, one after the other.

        produces:     ProcessGroup, WeightGone, Refused
        waits for:    ``takes``
        unblocked by: the next request
        """
        assert self._groups is not None
        while True:
            incoming, request = await self._requests.get()
            answer = await self._group_for(incoming, request, self._groups)
            await self._channel.send(incoming.peer, answer)

    async def _group_for(self, incoming: Incoming, request: ProcessGroupRequest, groups: SendingGroups) -> Message:
        snapshot = self._store.snapshot(request.policy_version)
        if snapshot is None:
            return WeightGone(policy_version=request.policy_version, newest_version=self.newest_version)
        # Hashing takes seconds for each gigabyte: not in the event loop.
        checksums = await asyncio.to_thread(self._checksums.of, snapshot, request.device)
        try:
            group = groups.ready(first_identity(incoming.peer), request.group)
        except RuntimeError as error:
            log.warning("weights_group_failed", error=str(error))
            return Refused(reason="the learner cannot open a process group", message_type=message_type(request))
        group.promised = snapshot
        return ProcessGroup(
            policy_version=snapshot.policy_version,
            group=group.name,
            port=group.port,
            backend=groups.backend,
            checksums=checksums,
        )

    def _broadcast(self, incoming: Incoming, request: BroadcastRequest, groups: SendingGroups) -> None:
        """Send the requested tensors. If that is impossible, end the group: its engine waits already."""
        peer = first_identity(incoming.peer)
        group = groups.get(peer, request.group)
        snapshot = None if group is None else group.promised
        if group is None or snapshot is None or snapshot.policy_version != request.policy_version:
            groups.leave(peer)
            return
        tensors = snapshot.manifest.tensors[request.first_tensor : request.first_tensor + request.num_tensors]
        if len(tensors) < request.num_tensors:
            groups.leave(peer)
            return
        data = snapshot.data[tensors[0].offset : tensors[-1].offset + tensors[-1].num_bytes]
        group.send(data)
        self._metrics.weight_bytes_sent.inc(data.nbytes)
        if request.first_tensor + request.num_tensors == len(snapshot.manifest.tensors):
            group.promised = None

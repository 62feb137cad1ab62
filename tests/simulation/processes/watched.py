"""The broker's store, retention and channels, which tell the audit what they do; and its disk."""

import sqlite3
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from gspo_protocol.channels import ChannelSpec
from gspo_protocol.codec import Array
from gspo_protocol.messages import Message
from gspo_services.broker.metrics import BrokerMetrics
from gspo_services.broker.retention import Retention
from gspo_services.broker.rows import ArchivedRow, ArchiveRow, LedgerContents
from gspo_services.broker.store.commits import Commit
from gspo_services.broker.store.payload import StoredChunk
from gspo_services.broker.store.reader import StoreCorrupt
from gspo_services.broker.store.store import RowChanges, Store
from gspo_services.shared.net.authenticator import Authenticator
from gspo_services.shared.net.channel import Incoming, RouterChannel
from gspo_services.shared.settings.sections import Settings
from tests.simulation.audit.audit import Audit
from tests.simulation.disk.damage import Damage

HOSTILE_NAME = "hostile"


class Disk:
    """A broker's disk. While it is ``full``, transactions fail at their end."""

    def __init__(self) -> None:
        self.full = False
        self.newest_commit = 0
        self.damage: Damage | None = None
        """What was done to its files while the broker was down."""


class WatchedStore(Store):
    """The real store; it tells the audit what is durable, and its disk can be full."""

    def __init__(self, path: Path, *, fingerprint: str, run_id: str, audit: Audit, disk: Disk) -> None:
        self._audit = audit
        self._disk = disk
        super().__init__(path, fingerprint=fingerprint, run_id=run_id)
        audit.require(
            self.newest.number >= disk.newest_commit,
            "damage is an event",
            lambda: f"the broker starts at commit {self.newest.number}, {disk.newest_commit} were made",
        )

    def contents(self) -> LedgerContents:
        contents = super().contents()
        damage, self._disk.damage = self._disk.damage, None
        if damage is not None:
            self._audit.require(not damage.flipped, "damage is an event", lambda: "the broker starts with a changed row")
            self._audit.happened[f"damage without loss: {damage.kind}"] += 1
            damage.forget()
        return contents

    def chunks(self, trajectory_id: int, begin: int = 0, end: int = 2**62) -> list[StoredChunk]:
        durable = self._audit.durable
        group = durable.groups[durable.trajectories[trajectory_id].group_id]
        index = group.batch if group.status == "batched" else None
        # The last group, so that the learner may have a part of the batch already.
        is_last = index is not None and durable.batches[index].group_ids[-1] == group.group_id
        if index is not None and is_last and self._audit.poison.get(index) == "unreadable":
            # Audited as if it had been sent: the broker has tried.
            self._audit.delivered_to[index].add("nobody")
            raise StoreCorrupt(f"batch {index}: poison")
        return super().chunks(trajectory_id, begin, end)

    def commit(self, changes: RowChanges) -> None:
        super().commit(changes)
        self._disk.newest_commit = self.newest.number
        self._audit.committed(changes)
        if any(isinstance(row, ArchivedRow) for row in changes.rows):
            self._audit.archived(self, changes)

    def _write(self, changes: RowChanges) -> Commit:
        commit = super()._write(changes)
        if self._disk.full:
            self._audit.happened["commit refused by the disk"] += 1
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return commit


class WatchedRetention(Retention):
    """The real retention; it tells the audit when a file is written that the ledger does not name yet."""

    def __init__(self, path: Path, metrics: BrokerMetrics, clock: Any, *, settings: Settings, audit: Audit) -> None:
        broker = settings.broker
        file_bytes = int(broker.archive_file_mib * 2**20)
        super().__init__(path, metrics, clock, keep_batches=broker.keep_batches, file_bytes=file_bytes)
        self._audit = audit

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        result = await super()._in_thread(function)
        if isinstance(result, ArchiveRow):
            self._audit.passes("archive written")
        return result


class WatchedRouter(RouterChannel):
    """The broker's end of a channel; it tells the audit everything that the broker receives and sends."""

    def __init__(self, context: Any, spec: ChannelSpec, endpoint: str, authenticator: Authenticator, audit: Audit) -> None:
        super().__init__(context, spec, endpoint, authenticator)
        self._audit = audit

    async def receive(self) -> Incoming:
        incoming = await super().receive()
        assert incoming.received is not None, incoming.error
        if HOSTILE_NAME.encode() in incoming.peer:
            return incoming
        self._audit.broker_received(
            incoming.peer, incoming.received.message, incoming.received.seq, incoming.received.arrays
        )
        return incoming

    async def send(self, peer: bytes, message: Message, arrays: Mapping[str, Array] | None = None) -> bool:
        if HOSTILE_NAME.encode() not in peer:
            self._audit.broker_sends(peer, message, arrays)
        return await super().send(peer, message, arrays)

    async def send_to_each(self, peers: Iterable[bytes], message: Message) -> list[bytes]:
        peers = list(peers)
        for peer in [peer for peer in peers if HOSTILE_NAME.encode() not in peer]:
            self._audit.broker_sends(peer, message, None)
        return await super().send_to_each(peers, message)

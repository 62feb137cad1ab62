"""Deltas over the weight channel: bit-exact, whatever is missed, cut off or damaged."""

from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from gspo_protocol.channels import WEIGHTS
from gspo_protocol.messages import ManifestRequest, WeightChunk, WeightRequest
from gspo_services.learner.weights.delta import encode_delta
from gspo_services.learner.weights.snapshot import Delta, Snapshot, SnapshotStore
from gspo_services.rollout.weights.chunks import FetchError
from gspo_services.rollout.weights.fetch import DamagedError, fetch_newest
from gspo_services.rollout.weights.replica import Replica
from gspo_services.shared.net.peer import PeerClient
from tests.support.wire.replicas import content, hold
from tests.support.wire.served_weights import SOON_S, Publisher, Served, served
from tests.support.wire.snapshots import bytes_of, snapshot_of
from tests.support.wire.zmq_ends import a_client, connected, in_background, zmq_context


async def test_a_delta_brings_the_replica_from_one_version_to_the_next() -> None:
    async with served() as (server, client):
        learner, replica = Publisher(server), Replica()
        kinds: list[str] = []
        learner.publish()
        assert await fetch_newest(client, 0, replica, fetched=lambda manifest: kinds.append(manifest.kind)) is replica
        full = server.count("weight_bytes_sent")
        snapshot = learner.publish()
        assert await fetch_newest(client, 1, replica, fetched=lambda manifest: kinds.append(manifest.kind)) is replica
        assert kinds == ["snapshot", "delta"]
        assert content(replica) == bytes_of(snapshot)
        assert replica.manifest == snapshot.manifest
        assert server.count("weight_bytes_sent") - full < 0.05 * full
        assert await fetch_newest(client, 2, replica) is None


async def test_a_partly_fetched_delta_continues_where_it_stopped() -> None:
    other = torch.randn(9000, generator=torch.Generator().manual_seed(1))
    other[4000:] = 0
    base, snapshot = snapshot_of(1, [("w", torch.zeros(9000))]), snapshot_of(2, [("w", other)])
    delta = encode_delta(base, snapshot)
    assert delta is not None
    delta = Delta(manifest=msgspec.structs.replace(delta.manifest, chunk_bytes=4096), data=delta.data)
    replica = Replica()
    hold(replica, base)
    asked: list[tuple[int, int, int]] = []
    async with connected(WEIGHTS) as (end, client):

        async def answer() -> None:
            assert (await end.expect(ManifestRequest)).have_version == 1
            await end.reply(delta.manifest)
            for lost in (range(1, 100), ()):
                request = await end.expect(WeightRequest)
                asked.append((request.base_version, request.first_chunk, request.num_chunks))
                for index in range(request.first_chunk, request.first_chunk + request.num_chunks):
                    # A chunk of the snapshot of the same version does not belong to the delta.
                    stray = WeightChunk(policy_version=2, chunk=index)
                    await end.reply(stray, {"data": np.zeros(4096, dtype=np.uint8)})
                    if index not in lost:
                        chunk = WeightChunk(policy_version=2, base_version=1, chunk=index)
                        await end.reply(chunk, {"data": delta.chunk(index)})

        async with in_background(answer()):
            await fetch_newest(client, 1, replica, stall_s=SOON_S)
    assert content(replica) == bytes_of(snapshot)
    number = delta.num_chunks
    assert number > 2
    assert asked == [(1, 0, number), (1, 1, number - 1)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_bytes": 10**6}, "is a delta of 1000000 bytes, larger than the"),
        ({"policy_version": 1, "base_version": 1}, "None"),
        ({"kind": "snapshot"}, "the snapshot of version 2 has no tensors"),
    ],
)
async def test_an_impossible_delta_is_refused_before_anything_is_fetched(change: dict[str, Any], words: str) -> None:
    base, snapshot = (snapshot_of(version, [("w", torch.arange(900) * version * 1.5)]) for version in (1, 2))
    delta = encode_delta(base, snapshot)
    assert delta is not None
    replica = Replica()
    hold(replica, base)
    async with connected(WEIGHTS) as (end, client):

        async def answer() -> None:
            await end.expect(ManifestRequest)
            await end.reply(msgspec.structs.replace(delta.manifest, **change))
            await end.expect(WeightRequest)
            raise AssertionError("chunks were asked for")

        async with in_background(answer()):
            if words == "None":
                assert await fetch_newest(client, 1, replica) is None
            else:
                with pytest.raises(FetchError, match=words):
                    await fetch_newest(client, 1, replica)
    assert content(replica) == bytes_of(base)


class Receiver:
    """Fetches now and then, as WeightSync does: again after an error."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.replica = Replica()
        self.kinds: Counter[str] = Counter()

    async def fetch(self, client: PeerClient, snapshot: Snapshot) -> None:
        """Fetch until the replica is ``snapshot``."""
        have = self.replica.policy_version
        while True:
            try:
                await fetch_newest(client, have, self.replica, fetched=lambda manifest: self.kinds.update([manifest.kind]))
            except DamagedError:
                self.kinds["damaged"] += 1
                assert self.replica.policy_version == 0
                continue
            break
        assert self.replica.manifest == snapshot.manifest
        assert content(self.replica) == bytes_of(snapshot)


async def test_a_hundred_versions_are_bit_exact_with_joins_skips_and_damage() -> None:
    """``always`` takes every version, ``seldom`` every seventh, ``late`` begins at 60, ``away`` misses more than is kept."""
    async with zmq_context() as context:
        server = Served(context, SnapshotStore(max_deltas=20))
        learner = Publisher(server)
        receivers = {name: Receiver(name) for name in ("always", "seldom", "late", "away")}
        clients = {name: a_client(context, WEIGHTS, server.endpoint, name=name) for name in receivers}
        async with in_background(
            server.authenticator.run(), server.server.run(), *(client.run() for client in clients.values())
        ):
            for client in clients.values():
                await client.connected_welcome()
            for number in range(1, 101):
                learner.damage = number in (30, 75)
                snapshot = learner.publish(skip=3 if number % 25 == 0 else 0)
                takes = {
                    "always": True,
                    "seldom": number % 7 == 0,
                    "late": number >= 60,
                    "away": number <= 5 or number >= 90,
                }
                for name, receiver in receivers.items():
                    if takes[name]:
                        await receiver.fetch(clients[name], snapshot)
    assert receivers["always"].kinds == {"snapshot": 3, "delta": 97, "damaged": 2}
    # It meets version 30 in the chain to 35, and 75 in the chain to 77; the rest of a chain is not counted twice.
    assert receivers["seldom"].kinds["snapshot"] == 3
    assert receivers["seldom"].kinds["damaged"] == 2
    assert receivers["seldom"].kinds["delta"] > 80
    assert receivers["late"].kinds == {"snapshot": 2, "delta": 39, "damaged": 1}
    assert receivers["away"].kinds == {"snapshot": 2, "delta": 4 + 10}

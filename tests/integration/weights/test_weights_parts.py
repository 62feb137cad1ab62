"""Versions that several ranks of a learner have together: each serves its part, and rank 0 what a rollout does not reach."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from gspo_protocol.channels import WEIGHTS
from gspo_protocol.messages import Manifest, WeightPart, WeightRequest
from gspo_services.learner.weights import other_ranks
from gspo_services.rollout.weights import chunks
from gspo_services.rollout.weights import parts as fetching
from gspo_services.rollout.weights.chunks import FetchError
from gspo_services.rollout.weights.fetch import fetch_newest
from gspo_services.rollout.weights.parts import PartPlace, RankConnections, check_parts
from gspo_services.rollout.weights.replica import Replica
from gspo_services.shared.net import PeerClient
from gspo_services.shared.runtime.clock import MonotonicClock
from tests.support.wire.replicas import content
from tests.support.wire.shared_version import SharedVersions, shared_learner
from tests.support.wire.snapshots import bytes_of
from tests.support.wire.zmq_ends import PATIENCE_S, a_client, in_background, zmq_context

CUTS = (1000, 4000, 5000, 8320, 40_000, 40_004, 200_000, 300_000)
"""Of 308,450 bytes; 8,256 to 8,320 is a tensor."""


class Receiver:
    """A rollout that fetches, with connections of its own to other ranks."""

    def __init__(self, client: PeerClient, connected: Callable[[str], AbstractAsyncContextManager[PeerClient]]) -> None:
        self.client = client
        self.replica = Replica()
        self.ranks: RankConnections | None = RankConnections(connected, MonotonicClock(), stall_s=0.3)
        self.kinds: Counter[str] = Counter()

    async def fetch(self, stall_s: float = chunks.STALL_S) -> Replica:
        async with asyncio.timeout(PATIENCE_S):
            found = await fetch_newest(
                self.client, self.replica.policy_version, self.replica, ranks=self.ranks, stall_s=stall_s,
                fetched=lambda manifest: self.kinds.update([manifest.kind]),
            )  # fmt: skip
        assert found is not None
        return found


@asynccontextmanager
async def receiving(learner: SharedVersions, name: str = "r") -> AsyncIterator[Receiver]:
    async with zmq_context() as context:
        numbers = iter(range(1, 1000))

        @asynccontextmanager
        async def connected(endpoint: str) -> AsyncIterator[PeerClient]:
            client = a_client(context, WEIGHTS, endpoint, name=name, session=f"s{next(numbers)}")
            async with in_background(client.run()):
                yield client

        async with connected(learner.endpoint) as client:
            await client.connected_welcome()
            yield Receiver(client, connected)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
async def test_each_rank_sends_its_part_and_together_they_are_the_version(num_ranks: int) -> None:
    async with shared_learner(num_ranks, CUTS if num_ranks > 1 else ()) as learner, receiving(learner) as receiver:
        for _ in range(6):
            whole = await learner.publish()
            replica = await receiver.fetch()
            assert (replica.digest, content(replica)) == (whole.manifest.digest, bytes_of(whole))
        assert receiver.kinds == {"snapshot": 1, "delta": 5}
        assert all(learner.sent())
        async with receiving(learner, "late") as late:
            assert content(await late.fetch()) == bytes_of(whole)
        await learner.publish()
        # Rank 0 exports what all have sent.
        assert learner.sent()[0] == sum(rank._server.bytes_sent for rank in (learner.first, *learner.others))


async def test_tensors_without_elements_are_part_of_a_version() -> None:
    async with shared_learner(3, CUTS) as learner, receiving(learner) as receiver:
        first, *others = learner.tensors.items()
        nothing = torch.empty(0, 4, dtype=torch.bfloat16)
        learner.tensors = dict([("before", nothing), first, ("between", nothing), *others, ("after", nothing)])
        for _ in range(3):
            whole = await learner.publish()
            assert content(await receiver.fetch()) == bytes_of(whole)
        assert receiver.kinds == {"snapshot": 1, "delta": 2}


async def test_a_rollout_that_reaches_rank_0_alone_gets_the_parts_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    async with shared_learner(3, CUTS) as learner, receiving(learner) as receiver:
        assert receiver.ranks is not None
        connected = receiver.ranks._connected
        monkeypatch.setattr(fetching, "CONNECT_S", 0.2)

        def to_nowhere(endpoint: str) -> AbstractAsyncContextManager[PeerClient]:
            tried.append(endpoint)
            return connected("tcp://127.0.0.1:1")

        receiver.ranks._connected = to_nowhere
        for _ in range(3):
            whole = await learner.publish()
            assert content(await receiver.fetch()) == bytes_of(whole)
        assert sorted(tried) == sorted(rank.endpoint for rank in learner.others), "once, and not for each version"
        assert receiver.kinds == {"snapshot": 1, "delta": 2}
        receiver.ranks = None
        whole = await learner.publish()
        assert content(await receiver.fetch()) == bytes_of(whole)


async def test_a_rank_that_falls_silent_amid_a_part_is_replaced_by_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    async with shared_learner(2, CUTS) as learner, receiving(learner) as receiver:
        server = learner.others[0]._server
        send, silent = server.send_chunks, True

        async def seldom(incoming: Any, request: WeightRequest) -> None:
            if not silent or incoming.peer.startswith(b"learner"):
                await send(incoming, request)

        monkeypatch.setattr(server, "send_chunks", seldom)
        whole = await learner.publish()
        assert content(await receiver.fetch()) == bytes_of(whole)
        # Nobody is asked again for a while.
        silent = False
        assert receiver.ranks is not None
        assert list(receiver.ranks._silent) == [learner.others[0].endpoint]


async def test_a_part_that_is_gone_ends_the_fetch_and_the_whole_version_comes_next() -> None:
    async with shared_learner(2, CUTS) as learner, receiving(learner) as receiver:
        await learner.publish()
        await receiver.fetch()
        whole = await learner.publish()
        learner.others[0]._store._deltas.clear()
        with pytest.raises(FetchError, match="version 2 is gone"):
            await receiver.fetch()
        assert content(await receiver.fetch()) == bytes_of(whole)
        assert receiver.kinds == {"snapshot": 2}


async def test_a_part_of_another_version_or_damaged_is_never_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose bytes changed after it summed them, as with a copy that training wrote into."""
    async with shared_learner(2, CUTS) as learner, receiving(learner) as receiver:
        await learner.publish()
        newest = learner.others[0]._store.newest
        assert newest is not None
        damaged = newest.weights.pieces[1].data
        changed = damaged.copy()
        changed[3] ^= 4
        right = list(newest.weights.pieces)
        newest.weights.pieces = [right[0], right[1]._replace(data=changed), *right[2:]]
        for _ in range(2):
            with pytest.raises(FetchError, match="has digest"):
                await receiver.fetch()
            assert receiver.replica.policy_version == 0
        newest.weights.pieces = right
        await receiver.fetch()


async def test_rank_0_waits_for_a_rank_that_is_late_and_asks_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_ranks, "ASK_AGAIN_S", 0.02)
    async with shared_learner(2, CUTS) as learner, receiving(learner) as receiver:
        serve, may = learner.others[0].serve_part, asyncio.Event()
        asked: list[int] = []
        on_other = learner.others[0]._server.on_other

        async def late(publication: Any) -> None:
            await may.wait()
            await serve(publication)

        async def noted(incoming: Any, message: Any) -> bool:
            asked.append(message.policy_version)
            if len(asked) == 3:
                may.set()
            return await on_other(incoming, message)

        monkeypatch.setattr(learner.others[0], "serve_part", late)
        monkeypatch.setattr(learner.others[0]._server, "on_other", noted)
        whole = await learner.publish()
        assert len(asked) >= 3
        assert content(await receiver.fetch()) == bytes_of(whole)


async def test_a_rank_whose_part_is_of_another_version_is_not_a_delta() -> None:
    """A rank that lost its copy of the version before has nothing to compare with."""
    async with shared_learner(2, CUTS) as learner, receiving(learner) as receiver:
        await learner.publish()
        await receiver.fetch()
        learner.others[0]._store._snapshots.clear()
        whole = await learner.publish()
        assert content(await receiver.fetch()) == bytes_of(whole)
        assert receiver.kinds == {"snapshot": 2}


def random_bits(like: torch.Tensor) -> torch.Tensor:
    return torch.randint(0, 256, (like.nbytes,), dtype=torch.uint8).view(like.dtype).view(like.shape)


async def test_a_version_of_which_every_element_changed_is_a_snapshot() -> None:
    async with shared_learner(2, CUTS) as learner, receiving(learner) as receiver:
        await learner.publish()
        await receiver.fetch()
        learner.tensors = {name: random_bits(tensor) for name, tensor in learner.tensors.items()}
        whole = await learner.publish()
        assert content(await receiver.fetch()) == bytes_of(whole)
        assert receiver.kinds == {"snapshot": 2}


async def test_a_part_that_never_comes_ends_the_fetch_and_not_the_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank has died between the announcement and the fetch: neither it nor rank 0 has its part."""
    monkeypatch.setattr(other_ranks, "SILENCE_S", 0.1)
    async with shared_learner(2, CUTS) as learner, receiving(learner) as receiver:
        server, silent = learner.others[0]._server, True
        send = server.send_chunks

        async def seldom(incoming: Any, request: WeightRequest) -> None:
            if not silent:
                await send(incoming, request)

        monkeypatch.setattr(server, "send_chunks", seldom)
        whole = await learner.publish()
        with pytest.raises(FetchError, match=r"version 1: chunk 0 did not come in 6 requests"):
            await receiver.fetch(stall_s=0.2)
        assert receiver.replica.policy_version == 0
        silent = False
        assert content(await receiver.fetch()) == bytes_of(whole)


async def test_bits_that_are_no_numbers_and_the_sign_of_zero_arrive() -> None:
    async with shared_learner(2, CUTS) as learner, receiving(learner) as receiver:
        await learner.publish()
        await receiver.fetch()
        for tensor in learner.tensors.values():
            bits = tensor.contiguous().view(-1).view(torch.int16)
            bits[: len(bits) // 3 : 7] = 0x7FC1 if len(bits) % 2 else -0x8000
            tensor.view(-1).copy_(bits.view(tensor.dtype))
        for _ in range(2):
            whole = await learner.publish()
            assert content(await receiver.fetch()) == bytes_of(whole)
        assert receiver.kinds == {"snapshot": 1, "delta": 2}


# --- what a manifest may say of its parts -------------------------------------------------------------------------------


def in_parts(*parts: Any, kind: Any = "snapshot", num_bytes: int = 10) -> Manifest:
    return Manifest(
        policy_version=2, kind=kind, base_version=0, num_bytes=num_bytes, chunk_bytes=4, digest="d", tensors=[],
        parts=[WeightPart(*part) for part in parts],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        (in_parts((5, "", [(0, 5)]), (4, "tcp://b:1", [(5, 4)])), "parts have 9 bytes, num_bytes is 10"),
        (in_parts((10, "tcp://b:1", [(0, 10)])), "first part is at tcp://b:1"),
        (in_parts((5, "", [(0, 4)]), (5, "tcp://b:1", [(4, 6)])), "spans of part 0 have 4 bytes, its num_bytes is 5"),
        (in_parts((5, "", [(0, 5)]), (5, "tcp://b:1", [(4, 5)])), "bytes 4 to 5 not at all, or twice"),
        (in_parts((5, "", [(0, 5)]), (5, "tcp://b:1", [(6, 5)])), "bytes 5 to 6 not at all, or twice"),
        (in_parts((5, "", [(1, 5)]), (5, "tcp://b:1", [(6, 5)])), "bytes 0 to 1 not at all, or twice"),
    ],
)
def test_parts_that_are_not_the_manifest_are_refused(manifest: Manifest, words: str) -> None:
    with pytest.raises(FetchError, match=words):
        check_parts(manifest)


def test_parts_of_a_delta_follow_one_another_and_those_of_a_snapshot_go_where_they_belong() -> None:
    class Noted:
        def __init__(self) -> None:
            self.data = np.zeros(10, dtype=np.uint8)

        def put(self, begin: int, data: memoryview) -> None:
            self.data[begin : begin + len(data)] += np.frombuffer(data, dtype=np.uint8)

    spans = [[(0, 2), (6, 3)], [(2, 4), (9, 1)]]
    snapshot = in_parts((5, "", spans[0]), (5, "tcp://b:1", spans[1]))
    for manifest, expected in (
        (snapshot, [1, 2, 11, 12, 13, 14, 3, 4, 5, 15]),
        (structs.replace(snapshot, kind="delta"), [1, 2, 3, 4, 5, 11, 12, 13, 14, 15]),
    ):
        check_parts(manifest)
        noted = Noted()
        for number in range(2):
            place = PartPlace(manifest, number, noted)
            for begin, end in ((0, 4), (4, 5)):
                first = 10 * number + 1
                place.put(begin, memoryview(bytes(range(first + begin, first + end))))
        assert noted.data.tolist() == expected

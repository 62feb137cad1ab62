"""Snapshots over the weight channel: bit-exact, or not at all."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gspo_protocol.channels import WEIGHTS
from gspo_protocol.digests import version_digest
from gspo_protocol.messages import Loaded, Manifest, ManifestRequest, Pulse, Refused, WeightChunk, WeightGone, WeightRequest
from gspo_services.learner.weights.snapshot import Snapshot
from gspo_services.rollout.weights.chunks import MAX_STALLS, FetchError
from gspo_services.rollout.weights.fetch import fetch_newest
from gspo_services.rollout.weights.replica import Replica
from gspo_services.shared.net.peer import PeerClient
from tests.support.wire.replicas import content
from tests.support.wire.served_weights import SOON_S, Served, a_snapshot, served, weights
from tests.support.wire.snapshots import bytes_of
from tests.support.wire.zmq_ends import ScriptedEnd, a_client, connected, in_background, zmq_context


async def test_the_file_for_the_engine_has_the_learners_weights_bit_for_bit(tmp_path: Path) -> None:
    async with served() as (server, client):
        server.store.add(a_snapshot(3, big=True))
        fetched = await fetch_newest(client, 2, Replica(tmp_path, shard_bytes=100_000))
    assert fetched is not None
    assert fetched.policy_version == 3
    (tmp_path / "new").mkdir()
    fetched.files.link(tmp_path / "new", fetched.unloaded())
    assert len(list((tmp_path / "new").iterdir())) == 2, "one for the big tensor, one for the others"
    read = {name: tensor for path in (tmp_path / "new").iterdir() for name, tensor in load_file(path).items()}
    expected = weights(3, big=True)
    assert set(read) == set(expected)
    for name, tensor in expected.items():
        assert read[name].dtype == tensor.dtype
        assert read[name].shape == tensor.shape
        assert read[name].contiguous().reshape(-1).view(torch.uint8).equal(tensor.contiguous().reshape(-1).view(torch.uint8))


async def test_there_is_nothing_to_fetch_without_a_newer_version() -> None:
    async with served() as (server, client):
        assert await fetch_newest(client, 0) is None
        server.store.add(a_snapshot(3))
        assert await fetch_newest(client, 3) is None
        assert await fetch_newest(client, 4) is None
        newer = await fetch_newest(client, 2)
        assert newer is not None
        server.store.add(a_snapshot(4))
        newest = await fetch_newest(client, 3)
        assert newest is not None
        assert newest.policy_version == 4
    assert server.count("weight_bytes_sent") == 2 * a_snapshot(3).manifest.num_bytes


# --- a server that cannot be trusted ----------------------------------------------------------------------------------


async def fetch_from(end: ScriptedEnd, client: PeerClient, snapshot: Snapshot, chunks: list[tuple[int, bytes]]) -> Any:
    """Fetch while ``end`` answers the manifest request and then sends ``chunks`` (index, bytes) at the first request.

    Returns the weights, or the FetchError.
    """

    async def answer() -> None:
        await end.expect(ManifestRequest)
        await end.reply(snapshot.manifest)
        await end.expect(WeightRequest)
        for index, data in chunks:
            chunk = WeightChunk(policy_version=snapshot.policy_version, chunk=index)
            await end.reply(chunk, {"data": np.frombuffer(data, dtype=np.uint8)})

    async with in_background(answer()):
        try:
            return await fetch_newest(client, 0)
        except FetchError as error:
            return error


def body(snapshot: Snapshot, index: int) -> bytes:
    return snapshot.chunk(index).tobytes()


async def test_a_flipped_bit_is_found_and_its_tensor_named() -> None:
    snapshot = a_snapshot(chunk_bytes=4096)
    place = snapshot.manifest.tensors[1].offset
    async with connected(WEIGHTS) as (end, client):
        chunks = [[index, bytearray(body(snapshot, index))] for index in range(snapshot.num_chunks)]
        chunks[place // 4096][1][place % 4096] ^= 1
        error = await fetch_from(end, client, snapshot, [(index, bytes(data)) for index, data in chunks])
    assert isinstance(error, FetchError)
    assert snapshot.manifest.tensors[1].name in str(error)


async def test_a_chunk_of_another_size_is_refused() -> None:
    snapshot = a_snapshot(chunk_bytes=4096)
    async with connected(WEIGHTS) as (end, client):
        error = await fetch_from(end, client, snapshot, [(0, bytes(100))])
    assert isinstance(error, FetchError)
    assert str(error) == "chunk 0 has shape (100,), expected (4096,)"


def with_tensor(manifest: Manifest, index: int, **changes: Any) -> Manifest:
    """The manifest with one tensor changed, and a digest that agrees with it."""
    tensors = list(manifest.tensors)
    tensors[index] = msgspec.structs.replace(tensors[index], **changes)
    return msgspec.structs.replace(manifest, tensors=tensors, digest=version_digest(tensors))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: msgspec.structs.replace(m, digest="0" * 64), "its digest does not match its tensors"),
        (lambda m: msgspec.structs.replace(m, num_bytes=m.num_bytes + 4), "num_bytes is"),
        (lambda m: msgspec.structs.replace(m, kind="delta"), "is a delta"),
        (lambda m: with_tensor(m, 1, offset=0), "is at 0, expected 8192"),
        (lambda m: with_tensor(m, 1, num_bytes=60), r"has 60 bytes, bfloat16 \[32\] has 64"),
        (lambda m: with_tensor(m, 0, shape=[32, 63]), r"has 8192 bytes, float32 \[32, 63\] has 8064"),
        (lambda m: with_tensor(m, 1, name=m.tensors[0].name), "occurs twice"),
    ],
)
async def test_a_manifest_that_contradicts_itself_is_refused_before_anything_is_fetched(change: Any, words: str) -> None:
    manifest = change(a_snapshot().manifest)
    async with connected(WEIGHTS) as (end, client):

        async def answer() -> None:
            await end.expect(ManifestRequest)
            await end.reply(manifest)
            await end.expect(WeightRequest)
            raise AssertionError("chunks were asked for")

        async with in_background(answer()):
            with pytest.raises(FetchError, match=words):
                await fetch_newest(client, 0)


async def test_a_version_that_is_dropped_during_the_fetch_ends_it_at_once() -> None:
    snapshot = a_snapshot(5, chunk_bytes=4096)
    async with connected(WEIGHTS) as (end, client):

        async def answer() -> None:
            await end.expect(ManifestRequest)
            await end.reply(snapshot.manifest)
            await end.expect(WeightRequest)
            await end.reply(WeightChunk(policy_version=5, chunk=0), {"data": snapshot.chunk(0)})
            await end.reply(WeightGone(policy_version=5, newest_version=8))

        async with in_background(answer()):
            with pytest.raises(FetchError, match="version 5 is gone, newest is 8"):
                await fetch_newest(client, 0)


async def test_chunks_may_come_late_twice_and_in_any_order() -> None:
    snapshot = a_snapshot(chunk_bytes=2048)
    order = [3, 0, 0, 2, 3, *range(snapshot.num_chunks - 1, 0, -1)]
    async with connected(WEIGHTS) as (end, client):
        fetched = await fetch_from(end, client, snapshot, [(99, b"?"), *((index, body(snapshot, index)) for index in order)])
    assert content(fetched) == bytes_of(snapshot)


async def test_only_missing_chunks_are_asked_for_again() -> None:
    snapshot = a_snapshot(chunk_bytes=2048)
    asked: list[tuple[int, int]] = []
    async with connected(WEIGHTS) as (end, client):

        async def answer() -> None:
            await end.expect(ManifestRequest)
            await end.reply(snapshot.manifest)
            # The first request brings only chunks 0 and 1, the second none, the third all.
            for lost in (range(2, 100), range(100), ()):
                request = await end.expect(WeightRequest)
                asked.append((request.first_chunk, request.num_chunks))
                for index in range(request.first_chunk, request.first_chunk + request.num_chunks):
                    if index not in lost:
                        chunk = WeightChunk(policy_version=1, chunk=index)
                        await end.reply(chunk, {"data": snapshot.chunk(index)})

        async with in_background(answer()):
            fetched = await fetch_newest(client, 0, stall_s=SOON_S)
    assert fetched is not None
    assert content(fetched) == bytes_of(snapshot)
    number = snapshot.num_chunks
    assert asked == [(0, number), (2, number - 2), (2, number - 2)]


async def test_a_server_that_falls_silent_is_given_up_after_so_many_requests() -> None:
    snapshot = a_snapshot()
    async with connected(WEIGHTS) as (end, client):

        async def answer() -> None:
            await end.expect(ManifestRequest)
            await end.reply(snapshot.manifest)
            while True:
                await end.receive()

        async with in_background(answer()):
            with pytest.raises(FetchError, match=f"chunk 0 did not come in {MAX_STALLS} requests"):
                await fetch_newest(client, 0, stall_s=SOON_S)
        requests = [received for received in end.seen if isinstance(received.message, WeightRequest)]
        assert len(requests) == MAX_STALLS
        with pytest.raises(FetchError, match=rf"did not answer within {SOON_S} s"):
            await fetch_newest(client, 0, stall_s=SOON_S)


async def test_late_answers_to_an_earlier_fetch_are_ignored() -> None:
    former, snapshot = a_snapshot(1), a_snapshot(2, chunk_bytes=4096)
    async with connected(WEIGHTS) as (end, client):
        await end.reply(WeightChunk(policy_version=1, chunk=0), {"data": former.chunk(0)})
        await end.reply(WeightGone(policy_version=1, newest_version=2))
        chunks = [(index, body(snapshot, index)) for index in range(snapshot.num_chunks)]
        fetched = await fetch_from(end, client, snapshot, chunks)
    assert fetched.policy_version == 2
    assert content(fetched) == bytes_of(snapshot)


# --- the server's side ------------------------------------------------------------------------------------------------


async def test_a_peer_that_did_not_say_hello_is_told_to() -> None:
    async with zmq_context() as context:
        server = Served(context)
        client = a_client(context, WEIGHTS, server.endpoint)
        async with in_background(server.server.run()):
            await client._channel.send(ManifestRequest(have_version=0))
            answer = await client._channel.receive()
            assert answer.received is not None
            assert isinstance(answer.received.message, Refused)
            assert answer.received.message.reason.startswith("unknown session")


async def test_garbage_and_messages_of_other_channels_are_refused_and_counted() -> None:
    async with served() as (server, client):
        await client.inbox.get()
        await client.send(Pulse(policy_version=1, weights_endpoint=""))
        answer = (await client.inbox.get()).message
        assert answer == Refused(reason="pulse does not belong on the weights channel", message_type="pulse")
        await client._channel._socket.send_multipart([b"\xc1"])
        garbage = (await client.inbox.get()).message
        assert isinstance(garbage, Refused)
        assert garbage.reason.startswith("header is not msgpack")
        assert server.count("messages_refused", channel="weights") == 1


async def test_an_older_version_is_served_until_the_rollout_that_fetches_it_serves_it() -> None:
    async with served() as (server, client):
        await client.inbox.get()
        server.store.add(a_snapshot(1))
        await client.send(ManifestRequest(have_version=0))
        assert isinstance((await client.inbox.get()).message, Manifest)
        server.store.add(a_snapshot(2))
        await client.send(WeightRequest(policy_version=1, first_chunk=0, num_chunks=64))
        assert (await client.inbox.get()).message == WeightChunk(policy_version=1, chunk=0)
        await client.send(Loaded(policy_version=1, digest="ab" * 32))
        await client.send(WeightRequest(policy_version=1, first_chunk=0, num_chunks=1))
        assert (await client.inbox.get()).message == WeightGone(policy_version=1, newest_version=2)


async def test_a_request_for_a_version_that_is_gone_is_answered_with_the_newest() -> None:
    async with served() as (server, client):
        await client.inbox.get()
        for version in (1, 2, 3):
            server.store.add(a_snapshot(version))
            if version == 2:
                await client.send(ManifestRequest(have_version=0))
                assert isinstance((await client.inbox.get()).message, Manifest)
        await client.send(WeightRequest(policy_version=1, first_chunk=0, num_chunks=1))
        assert (await client.inbox.get()).message == WeightGone(policy_version=1, newest_version=3)
        await client.send(WeightRequest(policy_version=2, first_chunk=0, num_chunks=64))
        assert (await client.inbox.get()).message == WeightChunk(policy_version=2, chunk=0)

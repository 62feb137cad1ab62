"""Weights over the channel: bit-exact, or not at all."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zmq.asyncio
from prometheus_client import CollectorRegistry
from safetensors.torch import load_file

from protocol.channels import WEIGHTS
from protocol.digests import version_digest
from protocol.messages import Loaded, Manifest, ManifestRequest, Pulse, Refused, WeightChunk, WeightGone, WeightRequest
from services.learner.metrics import LearnerMetrics
from services.learner.snapshot import Snapshot, SnapshotStore, build_snapshot
from services.learner.weight_server import WeightServer
from services.rollout.metrics import RolloutMetrics
from services.rollout.sync import MAX_FAILED_LOADS, WeightSync
from services.rollout.weights import MAX_STALLS, WINDOW_CHUNKS, FetchError, fetch_newest, write_for_engine
from services.runtime.channel import RouterChannel
from services.runtime.clock import MonotonicClock
from services.runtime.gate import Gate
from services.runtime.lifecycle import ServiceError, flatten
from services.runtime.peer import PeerClient
from services.runtime.security import PLAINTEXT
from tests.support.scripted_engine import ScriptedEngine
from tests.support.zmq_ends import ANY_PORT, PATIENCE_S, ScriptedEnd, a_client, connected, in_background, zmq_context

SOON_S = 0.05


def weights(seed: int = 0, *, big: bool = False) -> dict[str, torch.Tensor]:
    """Tensors of every type and shape that is served; ``big``: more than one window of chunks."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "model.embed_tokens.weight": torch.randn(64, 32, generator=generator),
        "model.layers.0.input_layernorm.weight": torch.randn(32, generator=generator).to(torch.bfloat16),
        "model.layers.0.mlp.experts.3.down_proj.weight": torch.randn(7, 5, generator=generator).to(torch.float16),
        "model.layers.0.mlp.gate.weight": torch.randn(3, 3, generator=generator).t(),
        "model.norm.weight": torch.tensor(0.5),
    }
    if big:
        tensors["model.layers.1.big.weight"] = torch.randn(WINDOW_CHUNKS + 2, 512, 511, generator=generator)
    return tensors


def a_snapshot(version: int = 1, *, big: bool = False, chunk_bytes: int | None = None) -> Snapshot:
    snapshot = build_snapshot(version, weights(version, big=big).items())
    if chunk_bytes is None:
        return snapshot
    manifest = msgspec.structs.replace(snapshot.manifest, chunk_bytes=chunk_bytes)
    return Snapshot(manifest=manifest, data=snapshot.data)


class Served:
    """A real weight server and what it counts."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self.store = SnapshotStore()
        self.registry = CollectorRegistry()
        metrics = LearnerMetrics(self.registry)
        self.gate = Gate(context, PLAINTEXT, MonotonicClock(), metrics.gate_counters)
        self.channel = RouterChannel(context, WEIGHTS, ANY_PORT, self.gate)
        self.endpoint = self.channel.endpoint
        self.server = WeightServer(self.channel, self.store, metrics)

    def count(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(f"gspo_learner_{name}_total", labels)
        return 0.0 if value is None else value


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[tuple[Served, PeerClient]]:
    async with zmq_context() as context:
        server = Served(context)
        client = a_client(context, WEIGHTS, server.endpoint)
        async with in_background(server.gate.run(), server.server.run(), client.run()):
            await client.connected_welcome()
            yield server, client


# --- from the learner's tensors to the engine's file ------------------------------------------------------------------


async def test_what_is_written_for_the_engine_is_bit_for_bit_what_the_learner_held(tmp_path: Path) -> None:
    async with served() as (server, client):
        server.store.add(a_snapshot(3, big=True))
        fetched = await fetch_newest(client, 2)
    assert fetched is not None
    assert fetched.policy_version == 3
    write_for_engine(fetched, tmp_path / "new")
    read = load_file(tmp_path / "new" / "model.safetensors")
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


# --- a server that is not to be trusted -------------------------------------------------------------------------------


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
        (lambda m: with_tensor(m, 1, name=m.tensors[0].name), "is there twice"),
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
    assert bytes(fetched.data) == snapshot.data.tobytes()


async def test_what_does_not_come_is_asked_for_again_and_nothing_else() -> None:
    snapshot = a_snapshot(chunk_bytes=2048)
    asked: list[tuple[int, int]] = []
    async with connected(WEIGHTS) as (end, client):

        async def answer() -> None:
            await end.expect(ManifestRequest)
            await end.reply(snapshot.manifest)
            # Of the first request only chunks 0 and 1 come, of the second none, of the third all.
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
    assert bytes(fetched.data) == snapshot.data.tobytes()
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
        with pytest.raises(FetchError, match=r"did not answer within 0\.05 s"):
            await fetch_newest(client, 0, stall_s=SOON_S)


async def test_late_answers_to_a_former_fetch_are_passed_over() -> None:
    former, snapshot = a_snapshot(1), a_snapshot(2, chunk_bytes=4096)
    async with connected(WEIGHTS) as (end, client):
        await end.reply(WeightChunk(policy_version=1, chunk=0), {"data": former.chunk(0)})
        await end.reply(WeightGone(policy_version=1, newest_version=2))
        chunks = [(index, body(snapshot, index)) for index in range(snapshot.num_chunks)]
        fetched = await fetch_from(end, client, snapshot, chunks)
    assert fetched.policy_version == 2
    assert bytes(fetched.data) == snapshot.data.tobytes()


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


async def test_what_does_not_belong_on_the_channel_and_garbage_are_refused_and_counted() -> None:
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


async def test_a_version_that_is_not_held_is_gone_and_the_newest_is_named() -> None:
    async with served() as (server, client):
        for version in (1, 2, 3):
            server.store.add(a_snapshot(version))
        await client.inbox.get()
        await client.send(WeightRequest(policy_version=1, first_chunk=0, num_chunks=1))
        assert (await client.inbox.get()).message == WeightGone(policy_version=1, newest_version=3)
        await client.send(WeightRequest(policy_version=2, first_chunk=0, num_chunks=64))
        assert (await client.inbox.get()).message == WeightChunk(policy_version=2, chunk=0)


# --- following the announced version ----------------------------------------------------------------------------------


class Following:
    """A WeightSync between a real weight server and a scripted engine."""

    def __init__(self, context: zmq.asyncio.Context, directory: Path) -> None:
        self.served = Served(context)
        self.engine = ScriptedEngine()
        self.work_directory = directory / "work"
        self.registry = CollectorRegistry()
        self.sync = WeightSync(
            context=context,
            engine=self.engine,  # type: ignore[arg-type]
            work_directory=self.work_directory,
            pause_mode="retract",
            peer="rollout-0",
            session="s",
            clock=MonotonicClock(),
            metrics=RolloutMetrics(self.registry),
            retry_s=SOON_S,
        )
        self._changed = asyncio.Event()
        self.sync.on_change(self._changed.set)

    def publish(self, version: int) -> None:
        self.served.store.add(build_snapshot(version, self.tensors(version).items()))
        self.sync.announce(version, self.served.endpoint)

    @staticmethod
    def tensors(version: int) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in weights(version).items() if "experts" not in name}

    async def changed(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self._changed.wait()
        self._changed.clear()

    async def counted(self, name: str, number: float) -> None:
        """Wait until the server has counted so many."""
        async with asyncio.timeout(PATIENCE_S):
            while self.served.count(name) < number:  # noqa: ASYNC110 - what it waits for is in another task's counter
                await asyncio.sleep(0.005)

    def outcomes(self, outcome: str) -> float | None:
        return self.registry.get_sample_value("gspo_rollout_weight_updates_total", {"outcome": outcome})


@contextlib.asynccontextmanager
async def following(directory: Path) -> AsyncIterator[Following]:
    async with zmq_context() as context:
        follow = Following(context, directory)
        async with in_background(follow.served.gate.run(), follow.served.server.run(), follow.sync.run()):
            yield follow


async def test_an_announced_version_is_loaded_verified_and_reported(tmp_path: Path) -> None:
    async with following(tmp_path) as follow:
        assert (follow.sync.policy_version, follow.sync.may_generate.is_set()) == (0, False)
        follow.publish(4)
        await follow.changed()
        assert (follow.sync.policy_version, follow.sync.quarantined) == (4, "")
        assert follow.sync.may_generate.is_set()
        assert follow.engine.calls == ["pause retract", "update 4", "resume"]
        for name, tensor in follow.tensors(4).items():
            assert follow.engine.loaded[name][1] == tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        await follow.counted("weight_loads", 1)
        assert list(follow.work_directory.iterdir()) == []
        follow.publish(5)
        await follow.changed()
        assert follow.sync.policy_version == 5


async def test_a_version_that_is_announced_again_while_it_is_loaded_opens_no_connection_to_close_at_once(
    tmp_path: Path,
) -> None:
    async with following(tmp_path) as follow:
        follow.engine.damage = lambda _: follow.sync.announce(4, follow.served.endpoint)
        follow.publish(4)
        await follow.changed()
        await follow.counted("weight_loads", 1)
        follow.engine.damage = lambda _: None
        follow.publish(5)
        await follow.changed()
        await follow.counted("weight_loads", 2)
        assert follow.served.count("connections", outcome="accepted") == 2
        assert follow.served.count("refused_connections", reason="handshake") == 0


async def test_weights_that_arrive_damaged_in_the_engine_are_not_served(tmp_path: Path) -> None:
    def flip_a_bit(loaded: dict[str, Any]) -> None:
        info, data = loaded["model.norm.weight"]
        loaded["model.norm.weight"] = (info, bytes([data[0] ^ 1, *data[1:]]))

    async with following(tmp_path) as follow:
        follow.publish(1)
        await follow.changed()
        await follow.counted("weight_loads", 1)
        follow.engine.damage = flip_a_bit
        follow.publish(2)
        await follow.changed()
        assert follow.sync.policy_version == 0
        assert "model.norm.weight" in follow.sync.quarantined
        assert not follow.sync.may_generate.is_set()
        assert follow.engine.paused
        await follow.counted("weight_loads_failed", 1)
        assert follow.served.count("weight_loads") == 1
        assert follow.outcomes("failed") == 1
        follow.engine.damage = lambda _: None
        await follow.changed()
        assert (follow.sync.policy_version, follow.sync.quarantined) == (2, "")
        assert follow.sync.may_generate.is_set()
        assert not follow.engine.paused


@pytest.mark.parametrize("fault", ["skipped tensor", "wrong version", "refused update"])
async def test_an_engine_that_does_not_take_a_version_is_quarantined_and_in_the_end_given_up(
    fault: str, tmp_path: Path
) -> None:
    words = {"skipped tensor": "missing", "wrong version": "says version 3", "refused update": "out of memory"}[fault]
    async with zmq_context() as context:
        follow = Following(context, tmp_path)
        if fault == "skipped tensor":
            follow.engine.damage = lambda loaded: loaded.pop("model.norm.weight", None)
        elif fault == "wrong version":
            follow.engine.said_version = 3
        else:
            follow.engine.refuse_update = "out of memory"
        with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012 - the end of the conversation is what is tested
            async with in_background(follow.served.gate.run(), follow.served.server.run(), follow.sync.run()):
                follow.publish(2)
                async with asyncio.timeout(PATIENCE_S):
                    await asyncio.Event().wait()
        (error,) = flatten(caught.value)
        assert isinstance(error, ServiceError)
        assert "did not take policy version 2" in str(error)
        assert words in str(error)
        assert words in follow.sync.quarantined
        assert follow.sync.policy_version == 0
        assert follow.engine.paused
        assert "resume" not in follow.engine.calls
        assert sum(call == "update 2" for call in follow.engine.calls) == MAX_FAILED_LOADS
        assert follow.outcomes("loaded") == 0


async def test_an_announcement_before_the_server_holds_the_version_is_followed_when_it_does(tmp_path: Path) -> None:
    async with following(tmp_path) as follow:
        follow.sync.announce(1, follow.served.endpoint)
        async with asyncio.timeout(PATIENCE_S):
            while not follow.served.server._peers:  # noqa: ASYNC110 - the server keeps no event
                await asyncio.sleep(0.005)
        assert follow.engine.calls == []
        follow.publish(1)
        await follow.changed()
        assert follow.sync.policy_version == 1


async def test_versions_published_during_a_load_are_caught_up_with_in_one_step(tmp_path: Path) -> None:
    async with following(tmp_path) as follow:

        def publish_more(_: dict[str, Any]) -> None:
            follow.engine.damage = lambda _: None
            follow.publish(2)
            follow.publish(3)

        follow.engine.damage = publish_more
        follow.publish(1)
        await follow.changed()
        assert follow.sync.policy_version == 1
        await follow.changed()
        assert follow.sync.policy_version == 3
        assert "update 2" not in follow.engine.calls


@pytest.mark.parametrize("announced", [2, 3])
async def test_a_version_that_the_broker_has_not_announced_is_fetched_and_not_loaded(tmp_path: Path, announced: int) -> None:
    """Version 2 is served already. It is announced next, or its learner dies first and version 3 takes its place."""
    async with following(tmp_path) as follow:
        for version in (1, 2):
            follow.served.store.add(build_snapshot(version, follow.tensors(version).items()))
        num_bytes = build_snapshot(2, follow.tensors(2).items()).manifest.num_bytes
        follow.sync.announce(1, follow.served.endpoint)
        await follow.counted("weight_bytes_sent", num_bytes)
        for _ in range(3):  # the broker repeats itself
            follow.sync.announce(1, follow.served.endpoint)
            await asyncio.sleep(SOON_S)
        assert follow.engine.calls == []
        if announced == 3:
            follow.publish(3)
        else:
            follow.sync.announce(2, follow.served.endpoint)
        await follow.changed()
        assert follow.engine.calls == ["pause retract", f"update {announced}", "resume"]
        assert follow.sync.policy_version == announced


async def test_a_full_directory_is_named_with_the_way_out(tmp_path: Path) -> None:
    async with zmq_context() as context:
        follow = Following(context, tmp_path)
        follow.work_directory.write_text("a file where a directory should be")
        with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012 - the end of the conversation is what is tested
            async with in_background(follow.served.gate.run(), follow.served.server.run(), follow.sync.run()):
                follow.publish(1)
                async with asyncio.timeout(PATIENCE_S):
                    await asyncio.Event().wait()
        (error,) = flatten(caught.value)
        assert isinstance(error, ServiceError)
        assert "choose another rollout.weights_directory" in str(error)
        assert follow.engine.calls == []


async def test_a_load_is_reported_with_the_digest_that_was_sent(tmp_path: Path) -> None:
    """Against a scripted server, to see the report itself."""
    snapshot = build_snapshot(6, Following.tensors(6).items())
    async with zmq_context() as context:
        follow = Following(context, tmp_path)
        end = ScriptedEnd(context, WEIGHTS)
        async with in_background(follow.sync.run()):
            follow.sync.announce(6, end.endpoint)
            await end.welcome()
            await end.expect(ManifestRequest)
            await end.reply(snapshot.manifest)
            await end.expect(WeightRequest)
            await end.reply(WeightChunk(policy_version=6, chunk=0), {"data": snapshot.chunk(0)})
            loaded = await end.expect(Loaded)
    assert (loaded.policy_version, loaded.digest, loaded.error) == (6, snapshot.manifest.digest, "")
    assert loaded.pause_s > 0


async def test_a_hint_of_a_version_that_is_served_already_does_no_harm(tmp_path: Path) -> None:
    """The conversation with the weight server is over before it began; its socket must not be left to libzmq's thread."""
    async with following(tmp_path) as follow:
        # The broker repeats the newest version about every second, also during the load.
        follow.engine.damage = lambda _: follow.sync.announce(2, follow.served.endpoint)
        follow.publish(2)
        await follow.changed()
        await follow.counted("weight_loads", 1)
        gc.collect()
        follow.publish(3)
        await follow.changed()
        assert follow.sync.policy_version == 3

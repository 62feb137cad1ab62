"""Weights over the channel: bit-exact, or not at all."""

import asyncio
import contextlib
import gc
from collections import Counter
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
from services.learner.delta import encode_delta
from services.learner.metrics import LearnerMetrics
from services.learner.snapshot import Delta, Snapshot, SnapshotStore, build_snapshot
from services.learner.weight_server import WeightServer
from services.rollout.held import HeldWeights
from services.rollout.metrics import RolloutMetrics
from services.rollout.sync import MAX_FAILED_LOADS, WeightSync
from services.rollout.weights import MAX_STALLS, WINDOW_CHUNKS, DamagedError, FetchError, fetch_newest, write_for_engine
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

    def __init__(self, context: zmq.asyncio.Context, store: SnapshotStore | None = None) -> None:
        self.store = SnapshotStore() if store is None else store
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


# --- deltas -----------------------------------------------------------------------------------------------------------


def stepped(former: dict[str, torch.Tensor], seed: int, num_changed: int = 40) -> dict[str, torch.Tensor]:
    """One optimizer step further: a few elements of each tensor move, most of them by one step of their type."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, tensor in former.items():
        bits = tensor.detach().clone().contiguous().view(torch.int32 if tensor.dtype.itemsize == 4 else torch.int16)
        flat = bits.view(-1)
        chosen = torch.randperm(len(flat), generator=generator)[:num_changed]
        steps = torch.tensor([-1, 1, 1, -1, 700])[torch.randint(0, 5, (len(chosen),), generator=generator)]
        flat[chosen] += steps.to(flat.dtype)
        tensors[name] = bits.view(tensor.dtype)
    return tensors


def start() -> dict[str, torch.Tensor]:
    """Names that an engine of any number of experts knows."""
    tensors = {name: tensor for name, tensor in weights(0).items() if "experts" not in name}
    return {**tensors, "model.big.weight": torch.zeros(300, 500, dtype=torch.bfloat16)}


class Learner:
    """Publishes step after step; ``damage`` flips a bit of what it serves as the next delta."""

    def __init__(self, server: Served) -> None:
        self._server = server
        self._tensors = start()
        self.version = 0
        self.damage = False

    def publish(self, *, skip: int = 0) -> Snapshot:
        """``skip``: version numbers that were given to nobody."""
        self.version += 1 + skip
        self._tensors = stepped(self._tensors, self.version)
        snapshot, newest = build_snapshot(self.version, self._tensors.items()), self._server.store.newest
        delta = None if newest is None else encode_delta(newest, snapshot)
        assert newest is None or delta is not None
        if delta is not None and self.damage:
            data = delta.data.copy()
            data[-20] ^= 4
            delta = Delta(manifest=delta.manifest, data=data)
        self.damage = False
        self._server.store.add(snapshot, delta)
        return snapshot


async def test_a_delta_brings_the_copy_from_one_version_to_the_next() -> None:
    async with served() as (server, client):
        learner, held = Learner(server), HeldWeights()
        kinds: list[str] = []
        learner.publish()
        assert await fetch_newest(client, 0, held, fetched=lambda manifest: kinds.append(manifest.kind)) is held
        full = server.count("weight_bytes_sent")
        snapshot = learner.publish()
        assert await fetch_newest(client, 1, held, fetched=lambda manifest: kinds.append(manifest.kind)) is held
        assert kinds == ["snapshot", "delta"]
        assert bytes(held.data) == snapshot.data.tobytes()
        assert held.manifest == snapshot.manifest
        assert server.count("weight_bytes_sent") - full < 0.05 * full
        assert await fetch_newest(client, 2, held) is None


async def test_a_delta_that_was_fetched_in_part_goes_on_where_it_stopped() -> None:
    other = torch.randn(9000, generator=torch.Generator().manual_seed(1))
    other[4000:] = 0
    base, snapshot = build_snapshot(1, [("w", torch.zeros(9000))]), build_snapshot(2, [("w", other)])
    delta = encode_delta(base, snapshot)
    assert delta is not None
    delta = Delta(manifest=msgspec.structs.replace(delta.manifest, chunk_bytes=4096), data=delta.data)
    held = HeldWeights()
    held.replace(base.manifest, bytearray(base.data.tobytes()))
    asked: list[tuple[int, int, int]] = []
    async with connected(WEIGHTS) as (end, client):

        async def answer() -> None:
            assert (await end.expect(ManifestRequest)).have_version == 1
            await end.reply(delta.manifest)
            for lost in (range(1, 100), ()):
                request = await end.expect(WeightRequest)
                asked.append((request.base_version, request.first_chunk, request.num_chunks))
                for index in range(request.first_chunk, request.first_chunk + request.num_chunks):
                    # A chunk of the snapshot of the same version is another's.
                    stray = WeightChunk(policy_version=2, chunk=index)
                    await end.reply(stray, {"data": np.zeros(4096, dtype=np.uint8)})
                    if index not in lost:
                        chunk = WeightChunk(policy_version=2, base_version=1, chunk=index)
                        await end.reply(chunk, {"data": delta.chunk(index)})

        async with in_background(answer()):
            await fetch_newest(client, 1, held, stall_s=SOON_S)
    assert bytes(held.data) == snapshot.data.tobytes()
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
async def test_a_delta_that_cannot_be_one_is_refused_before_anything_is_fetched(change: dict[str, Any], words: str) -> None:
    base, snapshot = (build_snapshot(version, [("w", torch.arange(900) * version * 1.5)]) for version in (1, 2))
    delta = encode_delta(base, snapshot)
    assert delta is not None
    held = HeldWeights()
    held.replace(base.manifest, bytearray(base.data.tobytes()))
    async with connected(WEIGHTS) as (end, client):

        async def answer() -> None:
            await end.expect(ManifestRequest)
            await end.reply(msgspec.structs.replace(delta.manifest, **change))
            await end.expect(WeightRequest)
            raise AssertionError("chunks were asked for")

        async with in_background(answer()):
            if words == "None":
                assert await fetch_newest(client, 1, held) is None
            else:
                with pytest.raises(FetchError, match=words):
                    await fetch_newest(client, 1, held)
    assert bytes(held.data) == base.data.tobytes()


class Receiver:
    """Fetches now and then, as WeightSync does: again after an error."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.held = HeldWeights()
        self.kinds: Counter[str] = Counter()

    async def fetch(self, client: PeerClient, snapshot: Snapshot) -> None:
        """Until it holds ``snapshot``."""
        have = self.held.policy_version
        while True:
            try:
                await fetch_newest(client, have, self.held, fetched=lambda manifest: self.kinds.update([manifest.kind]))
            except DamagedError:
                self.kinds["damaged"] += 1
                assert self.held.policy_version == 0
                continue
            break
        assert self.held.manifest == snapshot.manifest
        assert bytes(self.held.data) == snapshot.data.tobytes()


async def test_a_hundred_versions_are_bit_exact_with_joins_skips_and_damage() -> None:
    """``always`` takes every version, ``seldom`` every seventh, ``late`` begins at 60, ``away`` misses more than is kept."""
    async with zmq_context() as context:
        server = Served(context, SnapshotStore(max_deltas=20))
        learner = Learner(server)
        receivers = {name: Receiver(name) for name in ("always", "seldom", "late", "away")}
        clients = {name: a_client(context, WEIGHTS, server.endpoint, name=name) for name in receivers}
        async with in_background(server.gate.run(), server.server.run(), *(client.run() for client in clients.values())):
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
    # It meets version 30 in the chain to 35, and 75 in that to 77; what is left of a chain is not counted twice.
    assert receivers["seldom"].kinds["snapshot"] == 3
    assert receivers["seldom"].kinds["damaged"] == 2
    assert receivers["seldom"].kinds["delta"] > 80
    assert receivers["late"].kinds == {"snapshot": 2, "delta": 39, "damaged": 1}
    assert receivers["away"].kinds == {"snapshot": 2, "delta": 4 + 10}


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
        self.newest = self.tensors(version)
        self.served.store.add(build_snapshot(version, self.tensors(version).items()))
        self.sync.announce(version, self.served.endpoint)

    def step(self, version: int, *changed: str, damage: bool = False) -> None:
        """Publish the newest version with another value in each of the tensors ``changed``, and the delta to it."""
        newest = self.served.store.newest
        assert newest is not None
        self.newest = {name: tensor.clone() for name, tensor in self.newest.items()}
        for name in changed:
            self.newest[name].view(-1)[0] += 1
        snapshot = build_snapshot(version, self.newest.items())
        delta = encode_delta(newest, snapshot)
        assert delta is not None
        if damage:
            delta = Delta(manifest=delta.manifest, data=delta.data ^ np.uint8(255))
        self.served.store.add(snapshot, delta)
        self.sync.announce(version, self.served.endpoint)

    def holds_newest(self) -> bool:
        """Whether the engine has every tensor of the version that was published last."""
        return {name: data for name, (_, data) in self.engine.loaded.items()} == {
            name: tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in self.newest.items()
        }

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

    def fetches(self, kind: str) -> float | None:
        return self.registry.get_sample_value("gspo_rollout_weight_fetches_total", {"kind": kind})

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


async def test_the_engine_is_given_what_changed_since_the_version_that_it_serves(tmp_path: Path) -> None:
    async with following(tmp_path) as follow:
        follow.publish(1)
        await follow.changed()
        for version, changed in ((2, "model.norm.weight"), (3, "model.embed_tokens.weight")):
            follow.step(version, changed)
            await follow.changed()
            assert follow.sync.policy_version == version
            assert follow.engine.files[-1] == [changed]
            assert follow.holds_newest()
        assert sorted(follow.engine.files[0]) == sorted(follow.newest)
        assert (follow.fetches("snapshot"), follow.fetches("delta")) == (1, 2)


async def test_nothing_is_generated_while_weights_are_loaded(tmp_path: Path) -> None:
    async with following(tmp_path) as follow:
        seen: list[bool] = []
        follow.publish(1)
        await follow.changed()
        follow.engine.damage = lambda _: seen.append(follow.sync.may_generate.is_set())
        follow.step(2, "model.norm.weight")
        await follow.changed()
        assert seen == [False]
        assert follow.sync.may_generate.is_set()


async def test_versions_that_were_skipped_are_loaded_together(tmp_path: Path) -> None:
    async with following(tmp_path) as follow:
        follow.publish(1)
        await follow.changed()

        def publish_more(_: dict[str, Any]) -> None:
            follow.engine.damage = lambda _: None
            follow.step(3, "model.layers.0.input_layernorm.weight")
            follow.step(4, "model.embed_tokens.weight")

        follow.engine.damage = publish_more
        follow.step(2, "model.norm.weight")
        await follow.changed()
        await follow.changed()
        assert follow.sync.policy_version == 4
        assert [sorted(file) for file in follow.engine.files[1:]] == [
            ["model.norm.weight"],
            ["model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"],
        ]
        assert follow.holds_newest()
        assert follow.fetches("delta") == 3


async def test_a_damaged_delta_is_counted_and_the_snapshot_fetched(tmp_path: Path) -> None:
    async with following(tmp_path) as follow:
        follow.publish(1)
        await follow.changed()
        follow.step(2, "model.norm.weight", damage=True)
        await follow.changed()
        assert follow.sync.policy_version == 2
        assert follow.holds_newest()
        assert follow.registry.get_sample_value("gspo_rollout_weights_damaged_total") == 1
        assert (follow.fetches("snapshot"), follow.fetches("delta")) == (2, 0)
        # The engine went on serving meanwhile.
        assert (follow.outcomes("failed"), follow.outcomes("not_fetched")) == (0, 1)


async def test_an_engine_that_cannot_take_a_part_gets_everything_from_then_on(tmp_path: Path) -> None:
    def spoil_when_partial(loaded: dict[str, Any]) -> None:
        if len(follow.engine.files[-1]) < len(follow.newest):
            info, data = loaded["model.embed_tokens.weight"]
            loaded["model.embed_tokens.weight"] = (info, bytes(len(data)))

    async with following(tmp_path) as follow:
        follow.engine.damage = spoil_when_partial
        follow.publish(1)
        await follow.changed()
        follow.step(2, "model.norm.weight")
        await follow.changed()
        assert follow.sync.policy_version == 0
        assert not follow.sync.may_generate.is_set()
        await follow.changed()
        assert (follow.sync.policy_version, follow.holds_newest()) == (2, True)
        follow.step(3, "model.norm.weight")
        await follow.changed()
        assert (follow.sync.policy_version, follow.holds_newest()) == (3, True)
        assert [len(file) for file in follow.engine.files] == [4, 1, 4, 4]
        assert follow.fetches("delta") == 2


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
    words = {"skipped tensor": "missing", "wrong version": "serves 3", "refused update": "out of memory"}[fault]
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

"""Targets: deltas of weights, whoever sends them, against a version that is held."""

from functools import cache
from itertools import pairwise
from random import Random
from typing import Final, cast

import msgspec
import numpy as np
from msgspec import structs

from protocol.codec import Received, decode
from protocol.deltas import Region, apply_streams, decode_digests, encode_region
from protocol.digests import tensor_digest, version_digest
from protocol.errors import ProtocolError
from protocol.messages import DeltaBucket, Manifest, ManifestRequest, Source, WeightChunk, WeightGone
from services.rollout.weights.fetch import FetchError, fetch_chunks, fetch_newest
from services.rollout.weights.replica import DamagedWeightsError, HeldWeights
from services.runtime.net.peer import PeerClient
from tests.fuzz.mutate import FRAME_MARK, mutate_frames
from tests.fuzz.target import Target, require
from tests.fuzz.targets.delta_inputs import BASE_VERSION, decompressed, delta_between, mutate_delta, versions
from tests.fuzz.targets.wire import MESSAGE_MARK, ScriptedServer, event_loop, joined, mutate_conversation

PEER_MARK: Final = MESSAGE_MARK * 2
"""Between what the learner says and what a neighbour says."""
SILENCE_S: Final = 0.001
"""What was said lies there already: nothing is worth waiting for."""


def _holding() -> HeldWeights:
    manifest, data = versions()[0]
    held = HeldWeights(keep_deltas=2)
    held.replace(manifest, bytearray(data))
    held.was_loaded()
    return held


def _require_true(held: HeldWeights) -> None:
    """What is held is nothing, or what its manifest says to the last bit."""
    if held.manifest is None:
        require(not held.data and held.policy_version == 0, "bytes of no version are held")
        return
    require(version_digest(held.manifest.tensors) == held.manifest.digest, "another version than the digest names")
    for info, data in held.tensors():
        require(tensor_digest(data) == info.digest, f"tensor {info.name} is not what its digest says")


# --- a bucket's streams --------------------------------------------------------------------------------------------------


def streams(data: bytes) -> None:
    """A bucket and its streams, decompressed, and a head: ValueError and nothing written, or the same however often."""
    header, *parts = data.split(FRAME_MARK)
    try:
        bucket = msgspec.msgpack.decode(header, type=DeltaBucket)
    except msgspec.MsgspecError:
        return
    base = versions()[0][1]
    head = b"".join(parts)
    try:
        digests, length = decode_digests(memoryview(head), 1 + bucket.num_changed % 4096)
        require(length <= len(head) and max(digests, default=0) <= 4096, "a digest of no tensor")
    except ValueError:
        pass
    target = np.frombuffer(bytearray(base), dtype=np.uint8)
    try:
        apply_streams(target, bucket, parts)
    except ValueError:
        require(target.tobytes() == base, "a bucket was refused and has written something")
        return
    begin, end = bucket.offset, bucket.offset + bucket.num_elements * bucket.item_bytes
    now = target.tobytes()
    require(now[:begin] == base[:begin] and now[end:] == base[end:], "a bucket wrote outside of its place")
    apply_streams(target, bucket, parts)
    require(target.tobytes() == now, "a delta that was applied twice is another one")
    region = Region(offset=begin, num_elements=bucket.num_elements, item_bytes=bucket.item_bytes)
    again = encode_region(np.frombuffer(base, dtype=np.uint8), target, region)
    if again is not None:
        other = np.frombuffer(bytearray(base), dtype=np.uint8)
        encoded = structs.replace(
            bucket, num_changed=again.num_changed, num_absolute=again.num_absolute, num_gap_bytes=again.streams[0].nbytes
        )
        apply_streams(other, encoded, [stream.tobytes() for stream in again.streams])
        require(other.tobytes() == now, "the same changes, encoded again, lead elsewhere")


@cache
def streams_seeds() -> list[bytes]:
    seeds: list[bytes] = []
    for base, snapshot in pairwise(versions()):
        manifest, payload = delta_between(base, snapshot)
        for bucket, bodies in decompressed(manifest, payload):
            if base[0].policy_version == BASE_VERSION or not seeds:
                seeds.append(FRAME_MARK.join([msgspec.msgpack.encode(bucket), *bodies]))
            else:
                # Of a later version: applied to the base its residues mean other values.
                seeds.insert(0, FRAME_MARK.join([msgspec.msgpack.encode(bucket), *bodies]))
    return seeds


def mutate_streams(data: bytes, rng: Random) -> bytes:
    """A change of the bucket, or of values in its streams, which stay as long as they are."""
    parts = data.split(FRAME_MARK)
    if rng.random() < 0.5 or len(parts) < 2:
        return mutate_frames(data, rng)
    at = 1 + rng.randrange(len(parts) - 1)
    body = bytearray(parts[at])
    for _ in range(rng.choice((1, 3)) if body else 0):
        body[rng.randrange(len(body))] = rng.choice((0, 1, 7, 8, 0x7F, 0xFE, 0xFF, rng.randrange(256)))
    parts[at] = bytes(body)
    return FRAME_MARK.join(parts)


# --- a delta against what is held ----------------------------------------------------------------------------------------


def delta(data: bytes) -> None:
    """A delta's manifest and payload: the version that its digest names, or DamagedWeightsError and nothing is held."""
    header, _, payload = data.partition(MESSAGE_MARK)
    try:
        manifest = decode([header]).message
    except ProtocolError:
        return
    if not isinstance(manifest, Manifest) or manifest.kind != "delta":
        return  # What a snapshot's manifest must be is looked at before it is fetched.
    held = _holding()
    before = held.manifest
    try:
        event_loop().run_until_complete(held.take(manifest, bytearray(payload)))
    except DamagedWeightsError as error:
        require(held.manifest is None and not held.data, f"something is held after {error}")
        require(held.parts(BASE_VERSION, 0) is None, "the damaged base is passed on")
        return
    except ValueError:
        require(manifest.base_version != BASE_VERSION, "an error that does not say that a delta is damaged")
        require(held.manifest is before, "a delta against another version has changed what is held")
        _require_true(held)
        return
    require(held.policy_version == manifest.policy_version, "another version is held than was taken")
    _require_true(held)
    require(not held.loads_all, "the engine is given everything after a delta")
    _require_passed_on(held, manifest)


def _require_passed_on(held: HeldWeights, manifest: Manifest) -> None:
    """Somebody who gets the delta from here comes to the same."""
    parts = held.parts(manifest.policy_version, BASE_VERSION)
    assert parts is not None
    other = _holding()
    other.apply(parts.manifest, parts.data.tobytes())
    require(bytes(other.data) == bytes(held.data), "the delta that is passed on leads elsewhere")
    was, now = versions()[0][1], bytes(held.data)
    written = {info.name for info, _ in held.unloaded_tensors()}
    assert held.manifest is not None
    for info in held.manifest.tensors:
        place = slice(info.offset, info.offset + info.num_bytes)
        require(info.name in written or was[place] == now[place], f"tensor {info.name} changed and the engine is not told")


@cache
def delta_seeds() -> list[bytes]:
    base, *others = versions()
    deltas = [delta_between(base, other) for other in others]
    return [joined(manifest, {}, None) + MESSAGE_MARK + payload for manifest, payload in deltas]


# --- a conversation with a learner, and with a neighbour that it names ---------------------------------------------------


class _Neighbour:
    """`services.rollout.weights.peers.Neighbours` over a connection that is scripted."""

    def __init__(self, said: list[Received]) -> None:
        self._server = ScriptedServer(said)
        self.num_wrong = 0

    def next_request(self) -> ManifestRequest:
        return ManifestRequest(have_version=0, endpoint="tcp://127.0.0.1:2", direct=bool(self.num_wrong))

    def were_wrong(self) -> None:
        self.num_wrong += 1

    async def fetch(self, manifest: Manifest) -> bytearray | None:
        self._server.inbox.put_nowait(
            Received(WeightGone(policy_version=manifest.policy_version, newest_version=0), {}, None)
        )
        try:
            return await fetch_chunks(cast(PeerClient, self._server), manifest, SILENCE_S, max_stalls=1)
        except FetchError:
            return None


def chain(data: bytes) -> None:
    """What a learner and a neighbour say to somebody who holds a version: a newer one, whole, or FetchError."""
    own, _, others = data.partition(PEER_MARK)
    said, neighbour = _decoded(own), _Neighbour(_decoded(others))
    said += [
        Received(WeightGone(policy_version=each.message.policy_version, newest_version=0), {}, None)
        for each in said
        if isinstance(each.message, Manifest)
    ]
    said.append(Received(WeightGone(policy_version=0, newest_version=0), {}, None))
    held = _holding()
    came: list[int] = []
    try:
        fetched = event_loop().run_until_complete(
            fetch_newest(
                cast(PeerClient, ScriptedServer(said)),
                BASE_VERSION,
                held,
                stall_s=SILENCE_S,
                fetched=lambda manifest: came.append(manifest.policy_version),
                sources=neighbour,
            )
        )
    except FetchError:
        fetched = None
    _require_true(held)
    require(held.coming == 0, "it is still said to be coming")
    require(came == sorted(set(came)), f"versions came in the order {came}")
    require(not came or held.policy_version in (0, came[-1]), "another version is held than came last")
    require(fetched is None or held.policy_version > BASE_VERSION, "a version that is not newer")
    require(neighbour.num_wrong <= data.count(b"manifest"), "somebody was wrong more often than he was asked")


def _decoded(data: bytes) -> list[Received]:
    found: list[Received] = []
    for part in data.split(MESSAGE_MARK):
        try:
            found.append(decode(part.split(FRAME_MARK)))
        except ProtocolError:
            continue
    return found


@cache
def chain_seeds() -> list[bytes]:
    """A delta, a chain of two, one from a neighbour, one that the neighbour damages, and a snapshot from it."""
    base, first, second, *_ = versions()
    one, two = delta_between(base, first), delta_between(first, second)
    source = [Source("tcp://127.0.0.1:1")]
    with_source = structs.replace(one[0], sources=source)
    chained = [joined(structs.replace(one[0], newest_version=second[0].policy_version), {}, None), *_chunks(*one)]
    chained += [joined(two[0], {}, None), *_chunks(*two)]
    wrong = _chunks(one[0], one[1][:-1] + bytes([one[1][-1] ^ 1]))
    snapshot = structs.replace(first[0], sources=source)
    conversations = (
        ([joined(one[0], {}, None), *_chunks(*one)], []),
        (chained, []),
        ([joined(with_source, {}, None)], _chunks(*one)),
        ([joined(with_source, {}, None), *_chunks(*one)], wrong),
        ([joined(snapshot, {}, None)], _chunks(*first)),
    )
    return [MESSAGE_MARK.join(own) + PEER_MARK + MESSAGE_MARK.join(others) for own, others in conversations]


def _chunks(manifest: Manifest, payload: bytes) -> list[bytes]:
    body, size = np.frombuffer(payload, dtype=np.uint8), manifest.chunk_bytes
    return [
        joined(
            WeightChunk(policy_version=manifest.policy_version, base_version=manifest.base_version, chunk=at),
            {"data": body[at * size : (at + 1) * size]},
            None,
        )
        for at in range(-(-len(payload) // size))
    ]


def mutate_chain(data: bytes, rng: Random) -> bytes:
    """A change of what one of the two says."""
    sides = data.split(PEER_MARK)
    at = rng.randrange(len(sides))
    sides[at] = mutate_conversation(sides[at], rng)
    return PEER_MARK.join(sides)


TARGETS = (
    Target(name="delta_streams", run=streams, seeds=streams_seeds, mutate=mutate_streams, cases=1_000_000),
    Target(name="delta", run=delta, seeds=delta_seeds, mutate=mutate_delta, cases=300_000),
    Target(name="delta_chain", run=chain, seeds=chain_seeds, mutate=mutate_chain, cases=200_000),
)

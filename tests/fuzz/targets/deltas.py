"""Targets for deltas of weights from the learner or a peer, applied to a replica."""

from functools import cache
from itertools import pairwise
from random import Random
from typing import Final, cast

import msgspec
import numpy as np
from msgspec import structs

from gspo_protocol.codec import Received, decode
from gspo_protocol.deltas import Region, decode_head, encode_region, region_elements
from gspo_protocol.digests import tensor_digest, version_digest
from gspo_protocol.errors import ProtocolError
from gspo_protocol.messages import DeltaBucket, Manifest, ManifestRequest, Source, WeightChunk, WeightGone
from gspo_services.rollout.weights.chunks import FetchError, fetch_chunks
from gspo_services.rollout.weights.fetch import fetch_newest
from gspo_services.rollout.weights.replica import DamagedWeightsError, DeltaBytes, Landing, Replica
from gspo_services.shared.net.peer import PeerClient
from tests.fuzz.mutate import FRAME_MARK, mutate_frames
from tests.fuzz.target import Target, require
from tests.fuzz.targets.delta_inputs import BASE_VERSION, decompressed, delta_between, mutate_delta, versions
from tests.fuzz.targets.wire import MESSAGE_MARK, ScriptedServer, event_loop, joined, mutate_conversation
from tests.support.wire.replicas import content, hold_bytes
from tests.support.wire.streams import apply_streams

PEER_MARK: Final = MESSAGE_MARK * 2
"""Separates the learner's messages from a peer's."""
SILENCE_S: Final = 0.001
"""Every message is there from the start, so nothing is worth a wait."""


def _replica() -> Replica:
    manifest, data = versions()[0]
    replica = Replica(keep_deltas=2)
    hold_bytes(replica, manifest, data)
    replica.was_loaded()
    return replica


def _received(payload: bytes) -> DeltaBytes:
    received = DeltaBytes()
    received.put(0, memoryview(payload))
    return received


def _require_true(replica: Replica) -> None:
    """The replica is empty, or is what its manifest says to the last bit."""
    if replica.manifest is None:
        require(replica.policy_version == 0, "the replica has bytes without a version")
        return
    require(version_digest(replica.manifest.tensors) == replica.manifest.digest, "another version than the digest names")
    for info, data in replica.tensors():
        require(tensor_digest(data) == info.digest, f"tensor {info.name} is not what its digest says")


# --- a bucket's streams --------------------------------------------------------------------------------------------------


def streams(data: bytes) -> None:
    """A bucket, its streams and a head: the same bytes however often it is applied, or ValueError and no change."""
    header, *parts = data.split(FRAME_MARK)
    try:
        bucket = msgspec.msgpack.decode(header, type=DeltaBucket)
    except msgspec.MsgspecError:
        return
    base = versions()[0][1]
    head = b"".join(parts)
    try:
        told = decode_head(memoryview(head), 1 + bucket.num_changed % 4096, bucket.num_absolute % 8)
        require(told.num_bytes <= len(head) and max(told.tensors, default=0) <= 4096, "a digest has no tensor")
    except ValueError:
        pass
    target = np.frombuffer(bytearray(base), dtype=np.uint8)
    try:
        apply_streams(target, bucket, parts)
    except ValueError:
        require(target.tobytes() == base, "a refused bucket has written something")
        return
    begin, end = bucket.offset, bucket.offset + bucket.num_elements * bucket.item_bytes
    now = target.tobytes()
    require(now[:begin] == base[:begin] and now[end:] == base[end:], "a bucket wrote outside of its place")
    apply_streams(target, bucket, parts)
    require(target.tobytes() == now, "a second application changes more")
    region = Region(offset=begin, num_elements=bucket.num_elements, item_bytes=bucket.item_bytes)
    whole = (np.frombuffer(base, dtype=np.uint8), target)
    again = encode_region(*(region_elements(each, region) for each in whole), region)
    if again is not None:
        other = np.frombuffer(bytearray(base), dtype=np.uint8)
        encoded = structs.replace(
            bucket, num_changed=again.num_changed, num_absolute=again.num_absolute, num_gap_bytes=again.streams[0].nbytes
        )
        apply_streams(other, encoded, [stream.tobytes() for stream in again.streams])
        require(other.tobytes() == now, "the same changes, encoded again, give other bytes")


@cache
def streams_seeds() -> list[bytes]:
    seeds: list[bytes] = []
    for base, snapshot in pairwise(versions()):
        manifest, payload = delta_between(base, snapshot)
        for bucket, bodies in decompressed(manifest, payload):
            if base[0].policy_version == BASE_VERSION or not seeds:
                seeds.append(FRAME_MARK.join([msgspec.msgpack.encode(bucket), *bodies]))
            else:
                # This one is for a later version: on the base, its residues mean other values.
                seeds.insert(0, FRAME_MARK.join([msgspec.msgpack.encode(bucket), *bodies]))
    return seeds


def mutate_streams(data: bytes, rng: Random) -> bytes:
    """Change the bucket, or values in its streams. The streams keep their lengths."""
    parts = data.split(FRAME_MARK)
    if rng.random() < 0.5 or len(parts) < 2:
        return mutate_frames(data, rng)
    at = 1 + rng.randrange(len(parts) - 1)
    body = bytearray(parts[at])
    for _ in range(rng.choice((1, 3)) if body else 0):
        body[rng.randrange(len(body))] = rng.choice((0, 1, 7, 8, 0x7F, 0xFE, 0xFF, rng.randrange(256)))
    parts[at] = bytes(body)
    return FRAME_MARK.join(parts)


# --- a delta for a replica -----------------------------------------------------------------------------------------------


def delta(data: bytes) -> None:
    """A delta's manifest and payload: the version that its digest names, or DamagedWeightsError and an empty replica."""
    header, _, payload = data.partition(MESSAGE_MARK)
    try:
        manifest = decode([header]).message
    except ProtocolError:
        return
    if not isinstance(manifest, Manifest) or manifest.kind != "delta":
        return  # A snapshot's manifest is checked before the fetch.
    replica = _replica()
    before = replica.manifest
    try:
        event_loop().run_until_complete(replica.take(manifest, _received(payload)))
    except DamagedWeightsError as error:
        require(replica.manifest is None and not content(replica), f"the replica is not empty after {error}")
        require(replica.parts(BASE_VERSION, 0) is None, "peers get the damaged base")
        return
    except ValueError:
        require(manifest.base_version != BASE_VERSION, "the error does not say that the delta is damaged")
        require(replica.manifest is before, "a delta for another version has changed the replica")
        _require_true(replica)
        return
    require(replica.policy_version == manifest.policy_version, "the replica has another version than the delta")
    _require_true(replica)
    require(not replica.loads_all, "a delta makes the engine load every tensor")
    _require_passed_on(replica, manifest)


def _require_passed_on(replica: Replica, manifest: Manifest) -> None:
    """A peer that gets the delta from this replica reaches the same bytes."""
    parts = replica.parts(manifest.policy_version, BASE_VERSION)
    assert parts is not None
    other = _replica()
    other.apply(parts.manifest, parts.data.tobytes())
    require(content(other) == content(replica), "the forwarded delta gives other bytes")
    was, now = versions()[0][1], content(replica)
    written = {replica.current.tensors[index].name for index in replica.unloaded()}
    assert replica.manifest is not None
    for info in replica.manifest.tensors:
        place = slice(info.offset, info.offset + info.num_bytes)
        require(info.name in written or was[place] == now[place], f"{info.name} changed, but the engine does not load it")


@cache
def delta_seeds() -> list[bytes]:
    base, *others = versions()
    deltas = [delta_between(base, other) for other in others]
    return [joined(manifest, {}, None) + MESSAGE_MARK + payload for manifest, payload in deltas]


# --- messages from a learner and from a peer that it names ---------------------------------------------------------------


class _ScriptedPeer:
    """A source of deltas like those of ``gspo_services.rollout.weights.peers``, over a scripted connection."""

    def __init__(self, said: list[Received]) -> None:
        self._server = ScriptedServer(said)
        self.num_wrong = 0

    def next_request(self) -> ManifestRequest:
        return ManifestRequest(have_version=0, endpoint="tcp://127.0.0.1:2", direct=bool(self.num_wrong))

    def were_wrong(self) -> None:
        self.num_wrong += 1

    async def fetch(self, manifest: Manifest, landing: Landing) -> bool:
        self._server.inbox.put_nowait(
            Received(WeightGone(policy_version=manifest.policy_version, newest_version=0), {}, None)
        )
        try:
            await fetch_chunks(cast(PeerClient, self._server), manifest, landing, SILENCE_S, max_stalls=1)
        except FetchError:
            return False
        return True


def chain(data: bytes) -> None:
    """Messages from a learner and a peer to a replica with a version: a newer whole version, or FetchError."""
    own, _, others = data.partition(PEER_MARK)
    said, peer = _decoded(own), _ScriptedPeer(_decoded(others))
    said += [
        Received(WeightGone(policy_version=each.message.policy_version, newest_version=0), {}, None)
        for each in said
        if isinstance(each.message, Manifest)
    ]
    said.append(Received(WeightGone(policy_version=0, newest_version=0), {}, None))
    replica = _replica()
    came: list[int] = []
    try:
        fetched = event_loop().run_until_complete(
            fetch_newest(
                cast(PeerClient, ScriptedServer(said)),
                BASE_VERSION,
                replica,
                stall_s=SILENCE_S,
                fetched=lambda manifest: came.append(manifest.policy_version),
                sources=peer,
            )
        )
    except FetchError:
        fetched = None
    _require_true(replica)
    require(replica.coming == 0, "a version still counts as coming")
    require(came == sorted(set(came)), f"versions came in the order {came}")
    require(not came or replica.policy_version in (0, came[-1]), "the replica has another version than came last")
    require(fetched is None or replica.policy_version > BASE_VERSION, "the version is not newer")
    require(peer.num_wrong <= data.count(b"manifest"), "the peer was wrong more often than it was asked")


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
    """A delta, a chain of two, a delta from a peer, a delta that the peer damages, and a snapshot from the peer."""
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
    """Change the messages of one side."""
    sides = data.split(PEER_MARK)
    at = rng.randrange(len(sides))
    sides[at] = mutate_conversation(sides[at], rng)
    return PEER_MARK.join(sides)


TARGETS = (
    Target(name="delta_streams", run=streams, seeds=streams_seeds, mutate=mutate_streams, cases=1_000_000),
    Target(name="delta", run=delta, seeds=delta_seeds, mutate=mutate_delta, cases=300_000),
    Target(name="delta_chain", run=chain, seeds=chain_seeds, mutate=mutate_chain, cases=200_000),
)

"""Targets for what arrives over ZeroMQ, and what a broker stores of it."""

import asyncio
import json
from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Any, Final, cast

import msgpack
import msgspec
import numpy as np

from gspo_protocol.codec import Received, decode, encode, message_type
from gspo_protocol.digests import tensor_digest, version_digest
from gspo_protocol.errors import ProtocolError
from gspo_protocol.messages import (
    MESSAGE_TYPES,
    Chunk,
    Chunks,
    Manifest,
    Message,
    Status,
    TensorInfo,
    WeightChunk,
    WeightGone,
)
from gspo_protocol.messages.gathered import Gathered, gather
from gspo_services.broker.store.payload import StoredChunk, chunk_checksum, chunk_header, join, stored_chunk, stored_chunks
from gspo_services.rollout.weights.chunks import FetchError
from gspo_services.rollout.weights.fetch import fetch_newest
from gspo_services.rollout.weights.replica import Replica
from gspo_services.shared.net.peer import PeerClient
from tests.fuzz.mutate import FRAME_MARK, mutate_frames
from tests.fuzz.target import Target, require
from tests.support.builders import a_chunk, a_lease, a_manifest, an_extension, lease_arrays, one_of_each, token_arrays
from tests.support.wire.golden import GOLDEN

MESSAGE_MARK: Final = FRAME_MARK * 2
"""Separates the messages that one side sends."""


def joined(message: Message, arrays: dict[str, np.ndarray[Any, Any]], seq: int | None = 1) -> bytes:
    return FRAME_MARK.join(bytes(frame) for frame in encode(message, arrays, seq))


def message(data: bytes) -> None:
    """Any frames: a message or ProtocolError. An accepted message can be forwarded and stored unchanged."""
    try:
        received = decode(data.split(FRAME_MARK))
    except ProtocolError as error:
        require(len(str(error)) < 4096, f"an error of {len(str(error))} characters")
        return
    require(message_type(received.message) in MESSAGE_TYPES, "a message without a type")
    frames = encode(received.message, received.arrays, received.seq)
    again = decode(frames)
    require(_same(again, received), f"{received.message} came back as {again.message}")
    require(encode(again.message, again.arrays, again.seq) == frames, "the same message has two encodings")
    if isinstance(received.message, Chunk):
        payload = join([_first(stored_chunk(received.message, **received.arrays))])
        require(payload.num_tokens == received.message.num_tokens, "a chunk was stored with another length")
    if isinstance(received.message, Chunks):
        _each_is_a_chunk_or_refused(Gathered(received.arrays))
    if isinstance(received.message, Status):
        json.dumps(received.message.status)


def _each_is_a_chunk_or_refused(chunks: Gathered) -> None:
    """Each of many is what a chunk may be, or ValueError; and what is seen of all at once is true of each."""
    for stretch in chunks.stretches:
        made = []
        for place in stretch.places:
            try:
                chunk, arrays = chunks.chunk(place)
            except ValueError:
                require(not stretch.is_usual, f"chunk {place} is a usual one, and is none at all")
                continue
            require(
                _same(decode(encode(chunk, arrays)), Received(chunk, arrays, None)), f"chunk {place} cannot be forwarded"
            )
            made.append(stored_chunk(chunk, arrays["token_ids"], arrays["logprobs"], "r"))
        if made:
            (stored,) = stored_chunks(chunks, [stretch], "r")
            told, sent = (join(_from_zero(of)) for of in ([stored], made))
            require(repr(told) == repr(sent), f"chunks {stretch.places} are stored as {told}, and were {sent}")
            require(stored.token_ids == b"".join(each.token_ids for each in made), "they are stored with other tokens")


def _from_zero(chunks: Sequence[StoredChunk]) -> list[StoredChunk]:
    """The same, counted from the first one's start, with checksums of that."""
    first = chunks[0].start
    moved = [each._replace(start=each.start - first) for each in chunks]
    return [
        each._replace(
            checksum=chunk_checksum(
                (each.trajectory_id, each.start, each.epoch, each.num_tokens), each.header, each.token_ids, each.logprobs
            )
        )
        for each in moved
    ]


def _first(chunk: StoredChunk) -> StoredChunk:
    """``chunk`` as the first of its trajectory."""
    return chunk._replace(start=0)


def _same(left: Received, right: Received) -> bool:
    if left.seq != right.seq or set(left.arrays) != set(right.arrays):
        return False
    if any(left.arrays[name].tobytes() != right.arrays[name].tobytes() for name in left.arrays):
        return False
    # NaN is not equal to itself, so == does not do.
    return repr(left.message) == repr(right.message)


@cache
def message_seeds() -> list[bytes]:
    """A message of every type, and the golden frames."""
    seeds = [joined(each, arrays) for each, arrays in one_of_each()]
    seeds.append(joined(a_chunk(), {**token_arrays(5), "experts": np.ones((3, 2, 2, 1), np.uint8)}))
    golden = json.loads(GOLDEN.read_text())["frames"]
    seeds += [FRAME_MARK.join(bytes.fromhex(frame) for frame in frames) for frames in golden.values()]
    seeds.append(joined(a_chunk(state={"deep": [[[{"a": [1.5]}]]], "none": None}, turn_rewards=[]), token_arrays(5)))
    seeds.append(joined(a_lease(num_tokens=0, state=None), lease_arrays(0), None))
    # Of many chunks, one that none may be: changes of bytes seldom make one.
    seeds.append(joined(*gather([(a_chunk(state={"raw": b"bytes"}), token_arrays(5)), (an_extension(), token_arrays(3))])))
    no_number = token_arrays(3) | {"logprobs": np.array([-0.5, np.nan, -0.5], np.float32)}
    seeds.append(joined(*gather([(a_chunk(), token_arrays(5)), (an_extension(), no_number)])))
    return seeds


def stored(data: bytes) -> None:
    """A chunk's header, token ids and log-probs, read from disk: a payload or ValueError."""
    parts = data.split(FRAME_MARK)
    header, token_ids, logprobs = (*parts, b"", b"")[:3]
    try:
        chunk_header(header)
    except ValueError:
        return
    num_tokens = len(token_ids) // 4
    checksum = chunk_checksum((1, 0, 1, num_tokens), header, token_ids, logprobs)
    chunk = StoredChunk(
        trajectory_id=1, start=0, epoch=1, num_tokens=num_tokens, header=header, token_ids=token_ids, logprobs=logprobs,
        checksum=checksum,
    )  # fmt: skip
    try:
        payload = join([chunk])
    except ValueError:
        return
    require(payload.token_ids.tobytes() == token_ids, "other tokens than stored")
    other = list(msgspec.to_builtins(chunk_header(header)))
    other[3] = not other[3]
    for changes in (
        {"header": msgpack.packb(other)},
        {"token_ids": token_ids + b"\0\0\0\0"},
        {"logprobs": logprobs + b"\0"},
    ):
        try:
            join([chunk._replace(**changes)])
        except ValueError:
            continue
        require(False, f"other {list(changes)} have the same checksum")


@cache
def stored_seeds() -> list[bytes]:
    chunks = [stored_chunk(each, **token_arrays(5)) for each in (a_chunk(), a_chunk(state=None, turn_rewards=[]))]
    return [FRAME_MARK.join((chunk.header, chunk.token_ids, chunk.logprobs)) for chunk in chunks]


class ScriptedServer:
    """Replaces the connection to a weight server. It sends a script of messages."""

    def __init__(self, said: list[Received]) -> None:
        self.inbox: asyncio.Queue[Received] = asyncio.Queue()
        for each in said:
            self.inbox.put_nowait(each)

    async def send(self, sent: Message) -> None:
        """Ignore what the client sends."""


def weights(data: bytes) -> None:
    """Messages from a weight server: a whole version with the digests of its manifest, or FetchError."""
    said: list[Received] = []
    for part in data.split(MESSAGE_MARK):
        try:
            said.append(decode(part.split(FRAME_MARK)))
        except ProtocolError:
            continue
    manifests = [each.message for each in said if isinstance(each.message, Manifest)]
    # The script ends with these, so that the client never waits.
    said += [Received(WeightGone(policy_version=each.policy_version, newest_version=0), {}, None) for each in manifests]
    said.append(Received(WeightGone(policy_version=0, newest_version=0), {}, None))
    try:
        fetched = event_loop().run_until_complete(fetch_newest(cast(PeerClient, ScriptedServer(said)), 3, stall_s=0.05))
    except FetchError:
        return
    if fetched is not None:
        _require_whole(fetched)


def _require_whole(fetched: Replica) -> None:
    require(fetched.policy_version > 3, "the version is not newer")
    assert fetched.manifest is not None
    require(version_digest(fetched.manifest.tensors) == fetched.manifest.digest, "another version than the manifest's")
    for info, data in fetched.tensors():
        require(tensor_digest(data) == info.digest, f"tensor {info.name} is not what its digest says")


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


@cache
def weights_seeds() -> list[bytes]:
    """A version of two tensors in three chunks: in order, in reverse, withdrawn midway, withdrawn at once."""
    data = [bytes(range(8)), bytes(range(100, 112))]
    first = TensorInfo("a.weight", "float32", [2], 0, 8, tensor_digest(data[0]))
    second = TensorInfo("b.weight", "bfloat16", [2, 3], 8, 12, tensor_digest(data[1]))
    empty = TensorInfo("c.weight", "float16", [0, 3], 20, 0, tensor_digest(b""))
    tensors = [first, second, empty]
    manifest = msgspec.structs.replace(
        a_manifest(), num_bytes=20, chunk_bytes=8, tensors=tensors, digest=version_digest(tensors)
    )
    body = np.frombuffer(b"".join(data), dtype=np.uint8)
    chunks = [joined(WeightChunk(policy_version=5, chunk=at), {"data": body[8 * at : 8 * at + 8]}, None) for at in range(3)]
    start = joined(manifest, {}, None)
    gone = joined(WeightGone(policy_version=5, newest_version=6), {}, None)
    orders = ([start, *chunks], [start, *chunks[::-1], chunks[0]], [start, chunks[0], gone], [gone])
    return [MESSAGE_MARK.join(each) for each in orders]


def mutate_conversation(data: bytes, rng: Random) -> bytes:
    """Change, double or drop a message, or describe other tensors."""
    parts = data.split(MESSAGE_MARK)
    at = rng.randrange(len(parts))
    match rng.randrange(5):
        case 0:
            parts.insert(at, rng.choice(parts))
        case 1 if len(parts) > 1:
            del parts[at]
        case 2:
            parts[0] = _new_layout(parts[0], rng)
        case _:
            parts[at] = mutate_frames(parts[at], rng)
    return MESSAGE_MARK.join(parts)


def _new_layout(part: bytes, rng: Random) -> bytes:
    """A manifest with another layout and a correct digest: this peer lies on purpose."""
    try:
        manifest = decode(part.split(FRAME_MARK)).message
    except ProtocolError:
        return part
    if not isinstance(manifest, Manifest):
        return part
    sizes = (0, 1, 3, 2**20, 2**31, 2**40, 2**52)
    tensors = []
    offset = 0
    for tensor in manifest.tensors[: rng.randint(1, 3)]:
        size = rng.choice(sizes)
        num_bytes = size * (4 if tensor.dtype == "float32" else 2)
        tensors.append(TensorInfo(tensor.name, tensor.dtype, [size], offset, min(num_bytes, 2**53), tensor.digest))
        offset += num_bytes
    changed = msgspec.structs.replace(
        manifest, tensors=tensors, num_bytes=min(offset, 2**53), digest=version_digest(tensors),
        chunk_bytes=rng.choice((1, 8, 2**20)),
    )  # fmt: skip
    return joined(changed, {}, None)


TARGETS = (
    Target(name="message", run=message, seeds=message_seeds, mutate=mutate_frames, cases=2_000_000),
    Target(name="stored_chunk", run=stored, seeds=stored_seeds, mutate=mutate_frames, cases=1_000_000),
    Target(name="weights", run=weights, seeds=weights_seeds, mutate=mutate_conversation, cases=200_000),
)

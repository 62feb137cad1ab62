"""Fetch a policy version over the weight channel, verify it, and write it for the engine to load.

Pull-based: the receiver asks for a window of chunks, so it never gets more than it can take, and asks again for what did not
come. Every tensor's digest is checked against the manifest before anything is written.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import structlog
from safetensors import TensorSpec, serialize_file

from protocol.digests import tensor_digest, version_digest
from protocol.messages import Manifest, ManifestRequest, TensorInfo, WeightChunk, WeightGone, WeightRequest
from services.runtime.peer import Delivered, PeerClient

log = structlog.get_logger()

STALL_S: Final = 5.0
MAX_STALLS: Final = 6
WINDOW_CHUNKS: Final = 16


class FetchError(RuntimeError):
    """A version could not be fetched whole; nothing was written. The caller tries again."""


@dataclass(frozen=True, kw_only=True)
class FetchedWeights:
    """A verified snapshot: ``data`` holds all tensors, each at its manifest's offset."""

    manifest: Manifest
    data: bytearray

    @property
    def policy_version(self) -> int:
        return self.manifest.policy_version

    def tensors(self) -> Iterator[tuple[TensorInfo, memoryview]]:
        """Each tensor's description and its bytes."""
        view = memoryview(self.data)
        for tensor in self.manifest.tensors:
            yield tensor, view[tensor.offset : tensor.offset + tensor.num_bytes]


async def fetch_newest(client: PeerClient, have_version: int) -> FetchedWeights | None:
    """The newest version of the weight server, verified; None when ``have_version`` is the newest.

    Raises: FetchError when the server says nothing for too long, drops the version, or sends wrong bytes.
    """
    await client.send(ManifestRequest(have_version=have_version))
    answer = await _next(client)
    if isinstance(answer.message, WeightGone):
        return None
    if not isinstance(answer.message, Manifest):
        raise FetchError(f"asked for a manifest, got {type(answer.message).__name__}")
    manifest = answer.message
    if manifest.kind != "snapshot":
        raise FetchError(f"version {manifest.policy_version} is a {manifest.kind}; this receiver takes snapshots")
    if manifest.policy_version <= have_version:
        return None
    _check_layout(manifest)
    weights = FetchedWeights(manifest=manifest, data=await _fetch_chunks(client, manifest))
    _verify(weights)
    return weights


def write_for_engine(weights: FetchedWeights, directory: Path) -> None:
    """Write one safetensors file into ``directory`` (created), under the engine's parameter names."""
    directory.mkdir(parents=True, exist_ok=True)
    base = np.frombuffer(weights.data, dtype=np.uint8)  # held here: the serializer reads raw addresses
    entries = {
        tensor.name: TensorSpec(
            dtype=tensor.dtype,
            shape=tensor.shape,
            data_ptr=base.ctypes.data + tensor.offset,
            data_len=tensor.num_bytes,
        )
        for tensor in weights.manifest.tensors
    }
    serialize_file(entries, str(directory / "model.safetensors"), {"format": "pt"})


async def _next(client: PeerClient) -> Delivered:
    """The next message that is about weights. Raises: FetchError after STALL_S without one."""
    try:
        async with asyncio.timeout(STALL_S):
            while True:
                delivered = await client.inbox.get()
                if isinstance(delivered.message, Manifest | WeightChunk | WeightGone):
                    return delivered
    except TimeoutError as error:
        raise FetchError(f"the weight server said nothing for {STALL_S:.0f} s") from error


def _check_layout(manifest: Manifest) -> None:
    """Tensors must lie one behind the other and fill the version exactly."""
    offset = 0
    for tensor in manifest.tensors:
        if tensor.offset != offset:
            raise FetchError(f"manifest: tensor {tensor.name} is at {tensor.offset}, expected {offset}")
        offset += tensor.num_bytes
    if offset != manifest.num_bytes:
        raise FetchError(f"manifest: tensors have {offset} bytes, num_bytes is {manifest.num_bytes}")
    if version_digest(manifest.tensors) != manifest.digest:
        raise FetchError(f"manifest of version {manifest.policy_version}: its digest does not match its tensors")


async def _fetch_chunks(client: PeerClient, manifest: Manifest) -> bytearray:
    data = bytearray(manifest.num_bytes)
    num_chunks = -(-manifest.num_bytes // manifest.chunk_bytes)
    next_chunk, stalls = 0, 0
    while next_chunk < num_chunks:
        wanted = min(WINDOW_CHUNKS, num_chunks - next_chunk)
        await client.send(WeightRequest(policy_version=manifest.policy_version, first_chunk=next_chunk, num_chunks=wanted))
        try:
            next_chunk = await _receive_window(client, manifest, data, next_chunk, wanted)
            stalls = 0
        except FetchError:
            stalls += 1
            if stalls >= MAX_STALLS:
                raise
            log.warning("weight_fetch_stalled", policy_version=manifest.policy_version, chunk=next_chunk)
    return data


async def _receive_window(client: PeerClient, manifest: Manifest, data: bytearray, first: int, count: int) -> int:
    """Take chunks in order; returns the first chunk that did not come (a gap ends the window)."""
    expected = first
    while expected < first + count:
        delivered = await _next(client)
        message = delivered.message
        if isinstance(message, WeightGone):
            raise FetchError(f"version {manifest.policy_version} is gone, newest is {message.newest_version}")
        if not isinstance(message, WeightChunk) or message.policy_version != manifest.policy_version:
            continue  # an answer to an older request
        if message.chunk < expected:
            continue  # sent twice
        if message.chunk > expected:
            return expected
        begin = expected * manifest.chunk_bytes
        body = delivered.arrays["data"]
        end = min(begin + manifest.chunk_bytes, manifest.num_bytes)
        if body.shape != (end - begin,):
            raise FetchError(f"chunk {expected} has shape {body.shape}, expected ({end - begin},)")
        data[begin:end] = body.data
        expected += 1
    return expected


def _verify(weights: FetchedWeights) -> None:
    for tensor, data in weights.tensors():
        digest = tensor_digest(data)
        if digest != tensor.digest:
            raise FetchError(
                f"version {weights.policy_version}: tensor {tensor.name} arrived with digest {digest}, "
                f"the manifest says {tensor.digest}"
            )

"""Fetch a policy version over the weight channel, verify it, and write it for the engine to load.

Pull-based: the receiver asks for a window of chunks, so it never gets more than it can take, and asks again for what did not
come. Every tensor's digest is checked against the manifest before anything is written.
"""

import asyncio
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from protocol.digests import tensor_digest, version_digest
from protocol.messages import Manifest, ManifestRequest, TensorInfo, WeightChunk, WeightGone, WeightRequest
from services.rollout.safetensors_file import write_safetensors
from services.runtime.peer import PeerClient

log = structlog.get_logger()

STALL_S: Final = 5.0
MAX_STALLS: Final = 6
"""Silences in a row, without one chunk between them, after which a fetch is given up."""
WINDOW_CHUNKS: Final = 16
DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


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


async def fetch_newest(client: PeerClient, have_version: int, *, stall_s: float = STALL_S) -> FetchedWeights | None:
    """The newest version of the weight server, verified; None when ``have_version`` is the newest.

    ``stall_s``: silence after which a request is sent again.
    Raises: FetchError when the server says nothing for too long, drops the version, or sends wrong bytes.
    """
    manifest = await _newest_manifest(client, have_version, stall_s)
    if manifest is None or manifest.policy_version <= have_version:
        return None
    if manifest.kind != "snapshot":
        raise FetchError(f"version {manifest.policy_version} is a {manifest.kind}; this receiver takes snapshots")
    _check_layout(manifest)
    weights = FetchedWeights(manifest=manifest, data=await _fetch_chunks(client, manifest, stall_s))
    # Hashing takes a second for each gigabyte: not in the event loop.
    await asyncio.to_thread(_verify, weights)
    return weights


def write_for_engine(weights: FetchedWeights, directory: Path) -> None:
    """Write one safetensors file into ``directory`` (created), under the engine's parameter names."""
    directory.mkdir(parents=True, exist_ok=True)
    write_safetensors(directory / "model.safetensors", list(weights.tensors()))


async def _newest_manifest(client: PeerClient, have_version: int, stall_s: float) -> Manifest | None:
    """The server's newest manifest; None when it holds nothing. Late answers to older requests are passed over."""
    await client.send(ManifestRequest(have_version=have_version))
    try:
        async with asyncio.timeout(stall_s):
            while True:
                message = (await client.inbox.get()).message
                if isinstance(message, Manifest):
                    return message
                if isinstance(message, WeightGone) and message.policy_version == 0:
                    return None
    except TimeoutError as error:
        raise FetchError(f"the weight server did not answer within {stall_s:g} s") from error


def _check_layout(manifest: Manifest) -> None:
    """Tensors have different names, lie one behind the other, and fill the version exactly."""
    offset = 0
    names: set[str] = set()
    for tensor in manifest.tensors:
        if tensor.offset != offset:
            raise FetchError(f"manifest: tensor {tensor.name} is at {tensor.offset}, expected {offset}")
        expected = math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
        if tensor.num_bytes != expected:
            raise FetchError(
                f"manifest: tensor {tensor.name} has {tensor.num_bytes} bytes, {tensor.dtype} {tensor.shape} has {expected}"
            )
        if tensor.name in names:
            raise FetchError(f"manifest: tensor {tensor.name} is there twice")
        names.add(tensor.name)
        offset += tensor.num_bytes
    if offset != manifest.num_bytes:
        raise FetchError(f"manifest: tensors have {offset} bytes, num_bytes is {manifest.num_bytes}")
    if version_digest(manifest.tensors) != manifest.digest:
        raise FetchError(f"manifest of version {manifest.policy_version}: its digest does not match its tensors")


async def _fetch_chunks(client: PeerClient, manifest: Manifest, stall_s: float) -> bytearray:
    # Grows with what arrives: a manifest alone must not take the memory that it names.
    data = bytearray()
    num_chunks = -(-manifest.num_bytes // manifest.chunk_bytes)
    for first in range(0, num_chunks, WINDOW_CHUNKS):
        missing = set(range(first, min(first + WINDOW_CHUNKS, num_chunks)))
        data.extend(bytes(min((first + WINDOW_CHUNKS) * manifest.chunk_bytes, manifest.num_bytes) - len(data)))
        stalls = 0
        while missing:
            wanted = len(missing)
            lowest = min(missing)
            await client.send(
                WeightRequest(
                    policy_version=manifest.policy_version, first_chunk=lowest, num_chunks=max(missing) - lowest + 1
                )
            )
            try:
                await _receive_chunks(client, manifest, data, missing, stall_s)
            except TimeoutError as error:
                stalls = 0 if len(missing) < wanted else stalls + 1
                if stalls == MAX_STALLS:
                    raise FetchError(
                        f"version {manifest.policy_version}: chunk {min(missing)} did not come in {stalls} requests"
                    ) from error
                log.warning("weight_fetch_stalled", policy_version=manifest.policy_version, missing=len(missing))
    return data


async def _receive_chunks(
    client: PeerClient, manifest: Manifest, data: bytearray, missing: set[int], stall_s: float
) -> None:
    """Put chunks in their place until none is missing. Raises: TimeoutError after a silence; FetchError."""
    while missing:
        async with asyncio.timeout(stall_s):
            delivered = await client.inbox.get()
        message = delivered.message
        if isinstance(message, WeightGone) and message.policy_version == manifest.policy_version:
            raise FetchError(f"version {manifest.policy_version} is gone, newest is {message.newest_version}")
        if not isinstance(message, WeightChunk) or message.policy_version != manifest.policy_version:
            continue  # an answer to an older request
        if message.chunk not in missing:
            continue  # sent twice
        begin = message.chunk * manifest.chunk_bytes
        end = min(begin + manifest.chunk_bytes, manifest.num_bytes)
        body = delivered.arrays["data"]
        if body.shape != (end - begin,):
            raise FetchError(f"chunk {message.chunk} has shape {body.shape}, expected ({end - begin},)")
        data[begin:end] = body.data
        missing.discard(message.chunk)


def _verify(weights: FetchedWeights) -> None:
    for tensor, data in weights.tensors():
        digest = tensor_digest(data)
        if digest != tensor.digest:
            raise FetchError(
                f"version {weights.policy_version}: tensor {tensor.name} arrived with digest {digest}, "
                f"the manifest says {tensor.digest}"
            )

"""Digests that both ends of a channel compute, of weights and of batches: BLAKE2b-256, hexadecimal."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from gspo_protocol.messages import AdapterInfo, BatchPart, TensorInfo
from gspo_protocol.tiles import Sums, tile_sums

VERSION_KIND: Final = 2
"""Of the digests of versions, which end with it. It changes with what is hashed, or in which order. 1 (gspo 0.1.0) was over
all bytes, and had no ending."""


def bytes_digest(data: bytes | bytearray | memoryview) -> str:
    """Digest of bytes as they are, such as a delta's head."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def tensor_digest(data: bytes | bytearray | memoryview) -> str:
    """Digest of one tensor's little-endian bytes: over the sums of their tiles (``gspo_protocol.tiles``)."""
    return sums_digest(tile_sums(data), memoryview(data).nbytes)


def sums_digest(sums: Sums, num_bytes: int) -> str:
    """Digest of a tensor of ``num_bytes`` bytes whose tiles have these sums."""
    state = hashlib.blake2b(f"{num_bytes}\n".encode(), digest_size=32)
    state.update(sums.astype("<u8", copy=False).data)
    return state.hexdigest()


def version_digest(tensors: Iterable[TensorInfo], adapter: AdapterInfo | None = None) -> str:
    """Digest of a whole version: over every tensor's name, dtype, shape and digest, in the order of names, whatever rank has
    which. It ends with VERSION_KIND.

    That of an adapter is also over the model below it and its scale: the same matrices are another policy elsewhere.
    """
    state = hashlib.blake2b(digest_size=32)
    if adapter is not None:
        own = f"{adapter.rank} {adapter.alpha!r} {' '.join(adapter.modules)} {adapter.base_digest}"
        state.update(" ".join([own, *adapter.names]).encode() + b"\n")
    for tensor in sorted(tensors, key=lambda each: each.name):
        shape = "x".join(str(size) for size in tensor.shape)
        state.update(f"{tensor.name}\0{tensor.dtype}\0{shape}\0{tensor.digest}\n".encode())
    return f"{state.hexdigest()}-{VERSION_KIND}"


def version_kind(digest: str) -> int:
    """Return the kind of a version's digest: only those of one kind can be compared."""
    kind = digest.partition("-")[2]
    return int(kind) if kind.isdecimal() else 1


def part_digest(index: int, part: int, arrays: Mapping[str, np.ndarray[Any, Any]]) -> str:
    """Digest of one part of a batch: over its place, and its little-endian arrays in the order of the message."""
    state = hashlib.blake2b(f"{index} {part}\n".encode(), digest_size=32)
    for name in (*BatchPart.ARRAYS, *(name for name in BatchPart.OPTIONAL_ARRAYS if name in arrays)):
        array = np.ascontiguousarray(arrays[name])
        state.update(f"{name} {len(array)}\n".encode())
        state.update(array.reshape(-1).view(np.uint8).data)
    return state.hexdigest()

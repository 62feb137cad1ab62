"""Digests that both ends of the weight channel compute: BLAKE2b-256, hexadecimal."""

import hashlib
from collections.abc import Iterable

from protocol.messages import TensorInfo


def tensor_digest(data: bytes | bytearray | memoryview) -> str:
    """Digest of one tensor's little-endian bytes."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def version_digest(tensors: Iterable[TensorInfo]) -> str:
    """Digest of a whole version: over every tensor's name, dtype, shape and digest, in the manifest's order."""
    state = hashlib.blake2b(digest_size=32)
    for tensor in tensors:
        shape = "x".join(str(size) for size in tensor.shape)
        state.update(f"{tensor.name}\0{tensor.dtype}\0{shape}\0{tensor.digest}\n".encode())
    return state.hexdigest()

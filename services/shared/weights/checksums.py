"""The hashes behind the checksums of an engine's parameters.

They are those of SGLang 0.5.23 (``sglang.srt.managers.mm_utils.tensor_hash``) and of ``gspo_services.shared.sglang_cpu``. A
rollout compares them where an engine cannot sum its parameters, and a learner computes those of the model below adapters.
SGLang's hash on CUDA is in ``tiles``; our plug-in for SGLang on a CPU uses XXH3.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal, cast

import xxhash

from gspo_services.shared.weights.tiles import tiled_checksum

Hash = Literal["cpu", "cuda", "xxh3"]
"""SGLang's hash on a device, or XXH3, whose checksums begin with "xxh3-"."""
Checksum = Callable[[Sequence[bytes | bytearray | memoryview]], str]
"""Turns the bytes of a parameter, in pieces, into the checksum that the engine reports for it."""
_XXH3: Final = "xxh3-"


def engine_hash(device: str, checksums: Iterable[str]) -> Hash:
    """Return the hash that an engine on ``device`` used for these checksums. Raises: ValueError for an unknown device."""
    if any(checksum.startswith(_XXH3) for checksum in checksums):
        return "xxh3"
    if device in ("cpu", "cuda"):
        return cast(Hash, device)
    raise ValueError(f"no checksum is known for an engine on {device!r}, only on 'cpu' and 'cuda'")


def hash_function(name: Hash) -> Checksum:
    """Return the function of a hash."""
    checksums: dict[Hash, Checksum] = {"cpu": sha256_checksum, "cuda": tiled_checksum, "xxh3": xxh3_checksum}
    return checksums[name]


def xxh3_checksum(parts: Sequence[bytes | bytearray | memoryview]) -> str:
    """Compute XXH3 with 128 bits, after the name of the hash; it runs as fast as memory is read."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return _XXH3 + state.hexdigest()


def sha256_checksum(parts: Sequence[bytes | bytearray | memoryview]) -> str:
    """Compute SGLang's hash on a CPU: the first 8 bytes of SHA-256."""
    state = hashlib.sha256()
    for part in parts:
        state.update(part)
    return state.digest()[:8].hex()

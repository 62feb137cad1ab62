"""The hashes behind the checksums of an engine's parameters.

They are those of SGLang 0.5.23 (``sglang.srt.managers.mm_utils.tensor_hash``) and of ``services.sglang_cpu``. The learner
computes the checksums that an engine must report after an update through a process group; the rollout verifies every update;
SGLang on a CPU uses XXH3.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal, cast

import numpy as np
import xxhash

Hash = Literal["cpu", "cuda", "xxh3"]
"""SGLang's hash on a device, or XXH3, whose checksums begin with "xxh3-"."""
Words = np.ndarray[Any, np.dtype[np.uint32]]
Checksum = Callable[[Sequence[bytes | bytearray | memoryview]], str]
"""Turns the bytes of a parameter, in pieces, into the checksum that the engine reports for it."""
_XXH3: Final = "xxh3-"

_TILE_WORDS: Final = 8192
_TILES_AT_ONCE: Final = 64
"""2 MiB of words and a few temporaries of that size stay in the processor's cache."""
_SEED: Final = 0x243F6A88
_SEEDS: Final = (_SEED, ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF)
_POSITION_FACTORS: Final = (0x27D4EB2D, 0x165667B1)
_POSITION_ROTATIONS: Final = (15, 13)
_MASK_64: Final = 2**64 - 1


def engine_hash(device: str, checksums: Iterable[str]) -> Hash:
    """The hash that an engine on ``device`` used for these checksums. Raises: ValueError for an unknown device."""
    if any(checksum.startswith(_XXH3) for checksum in checksums):
        return "xxh3"
    if device in ("cpu", "cuda"):
        return cast(Hash, device)
    raise ValueError(f"no checksum is known for an engine on {device!r}, only on 'cpu' and 'cuda'")


def hash_function(name: Hash) -> Checksum:
    """The function of a hash."""
    checksums: dict[Hash, Checksum] = {"cpu": sha256_checksum, "cuda": tiled_checksum, "xxh3": xxh3_checksum}
    return checksums[name]


def xxh3_checksum(parts: Sequence[bytes | bytearray | memoryview]) -> str:
    """XXH3 with 128 bits, after the name of the hash; it runs as fast as memory is read."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return _XXH3 + state.hexdigest()


def sha256_checksum(parts: Sequence[bytes | bytearray | memoryview]) -> str:
    """SGLang's hash on a CPU: the first 8 bytes of SHA-256."""
    state = hashlib.sha256()
    for part in parts:
        state.update(part)
    return state.digest()[:8].hex()


def tiled_checksum(parts: Sequence[bytes | bytearray | memoryview]) -> str:
    """SGLang's hash on CUDA: two 32-bit hashes of each tile of 8,192 words, mixed with their positions; tiles are summed.

    Source: sglang/kernels/ops/memory/gpu_tensor_hash.py.
    """
    data = b"".join(parts)
    words: Words = np.frombuffer(data + bytes(-len(data) % 4), dtype="<u4")
    if not len(words):
        return f"{0:016x}"
    total = 0
    step = _TILE_WORDS * _TILES_AT_ONCE
    for start in range(0, len(words), step):
        total = (total + _tiles(words[start : start + step], start, len(words))) & _MASK_64
    return f"{_splitmix64(total):016x}"


def _tiles(words: Words, start: int, num_words: int) -> int:
    """Sum of the 64-bit hashes of the tiles in ``words``, which begin at index ``start`` of the parameter."""
    index = (np.arange(start, start + len(words), dtype=np.int64) & 0xFFFFFFFF).astype(np.uint32)
    bounds = np.arange(0, len(words), _TILE_WORDS)
    halves: list[np.ndarray[Any, np.dtype[np.uint64]]] = []
    for seed, factor, rotation in zip(_SEEDS, _POSITION_FACTORS, _POSITION_ROTATIONS, strict=True):
        position = (index * np.uint32(factor) + np.uint32(seed)) ^ _rotate_left(index, rotation)
        tile_sums = np.add.reduceat(_mix32(words ^ position), bounds, dtype=np.uint32)
        halves.append(_mix32(tile_sums ^ np.uint32(num_words * 4 & 0xFFFFFFFF)).astype(np.uint64))
    return int(((halves[0] << np.uint64(32)) | halves[1]).sum(dtype=np.uint64))


def _mix32(value: Words) -> Words:
    value = (value ^ (value >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    value = (value ^ (value >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return value ^ (value >> np.uint32(16))


def _rotate_left(value: Words, bits: int) -> Words:
    return (value << np.uint32(bits)) | (value >> np.uint32(32 - bits))


def _splitmix64(value: int) -> int:
    value ^= value >> 30
    value = (value * 0xBF58476D1CE4E5B9) & _MASK_64
    value ^= value >> 27
    value = (value * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)

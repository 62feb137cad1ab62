"""SGLang's hash on CUDA in numpy, stored so that a few changed words update it without reading the others.

Source: sglang/kernels/ops/memory/gpu_tensor_hash.py of SGLang 0.5.23. A parameter is cut into tiles of 8,192 words.
Each word is mixed with its position by two 32-bit hashes, and a tile's words are added up. The sums of each tile are mixed
with the parameter's length, and added up as 64 bits. A sum can be corrected: subtract the old word, add the new one.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

Words = np.ndarray[Any, np.dtype[np.uint32]]
Places = np.ndarray[Any, np.dtype[np.int64]]
_Piece = bytes | bytearray | memoryview

WORD_BYTES: Final = 4
_TILE_WORDS: Final = 8192
_TILES_AT_ONCE: Final = 64
"""2 MiB of words and a few temporaries of that size stay in the processor's cache."""
_STEP_BYTES: Final = _TILE_WORDS * _TILES_AT_ONCE * WORD_BYTES
_SEED: Final = 0x243F6A88
_SEEDS: Final = (_SEED, ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF)
_POSITION_FACTORS: Final = (0x27D4EB2D, 0x165667B1)
_POSITION_ROTATIONS: Final = (15, 13)
_MASK_64: Final = 2**64 - 1


class TileSums:
    """The sums of one parameter's tiles: 8 bytes for each 32 KiB of it."""

    def __init__(self, parts: Sequence[_Piece]) -> None:
        """``parts``: the parameter's bytes, in pieces; they are read once, and never joined."""
        self.num_bytes = sum(memoryview(part).nbytes for part in parts)
        num_words = -(-self.num_bytes // WORD_BYTES)
        self._sums = np.zeros((2, -(-num_words // _TILE_WORDS)), dtype=np.uint32)
        start = 0
        for words in _steps(parts):
            places = np.arange(start, start + len(words), dtype=np.int64)
            bounds = np.arange(0, len(words), _TILE_WORDS)
            first = start // _TILE_WORDS
            for half in range(2):
                mixed = _mixed(words, places, half)
                self._sums[half, first : first + len(bounds)] = np.add.reduceat(mixed, bounds, dtype=np.uint32)
            start += len(words)

    def change(self, begin: int, old: _Piece, new: _Piece) -> None:
        """Replace the bytes from ``begin`` on, ``old``, by ``new`` of equal length; both ends lie between two words.

        Raises: ValueError when one does not.
        """
        num_bytes = memoryview(old).nbytes
        if begin % WORD_BYTES or (num_bytes % WORD_BYTES and begin + num_bytes != self.num_bytes):
            raise ValueError(f"bytes {begin} to {begin + num_bytes} of {self.num_bytes} do not begin and end with a word")
        for start in range(0, num_bytes, _STEP_BYTES):
            before, after = (_words(memoryview(data).cast("B")[start : start + _STEP_BYTES]) for data in (old, new))
            found = np.flatnonzero(before != after)
            if len(found):
                self._correct(found + (begin + start) // WORD_BYTES, before[found], after[found])

    def _correct(self, places: Places, before: Words, after: Words) -> None:
        tiles = places // _TILE_WORDS
        bounds = np.flatnonzero(np.diff(tiles, prepend=-1))
        for half in range(2):
            change = _mixed(after, places, half) - _mixed(before, places, half)
            self._sums[half, tiles[bounds]] += np.add.reduceat(change, bounds, dtype=np.uint32)

    def checksum(self) -> str:
        """Return the hash of the whole parameter: 16 hexadecimal digits."""
        if not self._sums.shape[1]:
            return f"{0:016x}"
        length = np.uint32(-(-self.num_bytes // WORD_BYTES) * WORD_BYTES & 0xFFFFFFFF)
        high, low = (_mix32(sums ^ length).astype(np.uint64) for sums in self._sums)
        return f"{_splitmix64(int(((high << np.uint64(32)) | low).sum(dtype=np.uint64))):016x}"


def tiled_checksum(parts: Sequence[_Piece]) -> str:
    """Compute SGLang's hash on CUDA of a parameter's bytes, in pieces."""
    return TileSums(parts).checksum()


def _steps(parts: Sequence[_Piece]) -> Iterator[Words]:
    """The words of all parts, in arrays of _STEP_BYTES but the last; bytes are copied only around the ends of parts."""
    held = bytearray()
    for part in parts:
        if not memoryview(part).nbytes:
            continue
        rest = memoryview(part).cast("B")
        if held:
            taken = _STEP_BYTES - len(held)
            held += rest[:taken]
            rest = rest[taken:]
            if len(held) < _STEP_BYTES:
                continue
            yield _words(held)
            held = bytearray()
        whole = len(rest) - len(rest) % _STEP_BYTES
        for start in range(0, whole, _STEP_BYTES):
            yield _words(rest[start : start + _STEP_BYTES])
        held += rest[whole:]
    if held:
        yield _words(held)


def _words(data: bytearray | memoryview) -> Words:
    missing = -len(data) % WORD_BYTES
    return np.frombuffer(bytes(data) + bytes(missing) if missing else data, dtype="<u4")


def _mixed(words: Words, places: Places, half: int) -> Words:
    """Return each word mixed with its position in the parameter, by one of the two hashes: uint32 [words]."""
    index = (places & 0xFFFFFFFF).astype(np.uint32)
    position = (index * np.uint32(_POSITION_FACTORS[half]) + np.uint32(_SEEDS[half])) ^ _rotate_left(
        index, _POSITION_ROTATIONS[half]
    )
    return _mix32(words ^ position)


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

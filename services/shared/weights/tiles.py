"""SGLang's hash on CUDA in numpy.

Source: sglang/kernels/ops/memory/gpu_tensor_hash.py of SGLang 0.5.23. A parameter is cut into tiles of 8,192 words.
Each word is mixed with its position by two 32-bit hashes, and a tile's words are added up. The sums of each tile are mixed
with the parameter's length, and added up as 64 bits.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Final

import numpy as np

Words = np.ndarray[Any, np.dtype[np.uint32]]
_Piece = bytes | bytearray | memoryview
WORD_BYTES: Final = 4
TILE_WORDS: Final = 8192
_STEP_WORDS: Final = 16 * TILE_WORDS
"""A few arrays of this size stay in the cache; smaller ones would make threads wait for the interpreter's lock."""
_PIECE_BYTES: Final = 4 * _STEP_WORDS * WORD_BYTES
_SEED: Final = 0x243F6A88
SEEDS: Final = (_SEED, ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF)
POSITION_FACTORS: Final = (0x27D4EB2D, 0x165667B1)
POSITION_ROTATIONS: Final = (15, 13)
MIX_STEPS: Final = ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1))
"""Shifts to the right, and the factors after them."""
_MASK_32: Final = 2**32 - 1
_MASK_64: Final = 2**64 - 1


def tiled_checksum(parts: Sequence[_Piece]) -> str:
    """Compute SGLang's hash on CUDA of a parameter's bytes, in pieces; they are read once, and never joined."""
    num_bytes = sum(memoryview(part).nbytes for part in parts)
    sums = np.zeros((2, -(-num_bytes // (WORD_BYTES * TILE_WORDS))), dtype=np.uint32)
    for begin, pieces in _cut(parts):
        words = _words(pieces[0] if len(pieces) == 1 else bytearray().join(pieces))
        scratch = np.empty((2, min(len(words), _STEP_WORDS)), dtype=np.uint32)
        for start in range(0, len(words), _STEP_WORDS):
            _set(sums, begin // WORD_BYTES + start, words[start : start + _STEP_WORDS], scratch)
    return _checksum(sums, num_bytes)


def _set(sums: Words, start: int, words: Words, scratch: Words) -> None:
    """Set the sums of whole tiles, or of those at the end, from the word ``start`` on."""
    first = start // TILE_WORDS
    mixed, spare = scratch[:, : len(words)]
    whole = len(words) // TILE_WORDS
    for half in range(2):
        _mix_all(words, start, half, mixed, spare)
        own = sums[half, first : first + -(-len(words) // TILE_WORDS)]
        tiles = mixed[: whole * TILE_WORDS].reshape(whole, TILE_WORDS)
        np.add.reduce(tiles, axis=1, dtype=np.uint32, out=own[:whole])
        if whole < len(own):
            own[whole] = np.add.reduce(mixed[whole * TILE_WORDS :], dtype=np.uint32)


def _checksum(sums: Words, num_bytes: int) -> str:
    """The hash of a parameter of ``num_bytes`` from the sums of its tiles, [2, tiles]."""
    if not sums.shape[1]:
        return f"{0:016x}"
    length = np.uint32(-(-num_bytes // WORD_BYTES) * WORD_BYTES & _MASK_32)
    high, low = (_mix32(half ^ length).astype(np.uint64) for half in sums)
    return f"{_splitmix64(int(((high << np.uint64(32)) | low).sum(dtype=np.uint64))):016x}"


def _cut(parts: Sequence[_Piece]) -> Iterator[tuple[int, list[memoryview]]]:
    """Cut the bytes of all parts, end to end, into _PIECE_BYTES each but the last: where it begins, and its bytes."""
    begin, missing, pieces = 0, _PIECE_BYTES, list[memoryview]()
    for part in parts:
        rest = memoryview(part).cast("B") if memoryview(part).nbytes else memoryview(b"")
        while len(rest):
            pieces.append(rest[:missing])
            missing -= len(pieces[-1])
            rest = rest[len(pieces[-1]) :]
            if not missing:
                yield begin, pieces
                begin, missing, pieces = begin + _PIECE_BYTES, _PIECE_BYTES, []
    if pieces:
        yield begin, pieces


def _words(data: bytearray | memoryview) -> Words:
    missing = -len(data) % WORD_BYTES
    return np.frombuffer(bytes(data) + bytes(missing) if missing else data, dtype="<u4")


@cache
def _position_tables(half: int) -> tuple[Words, Words]:
    """The two terms of the hash of each position in the first step: of a later one they differ by a constant each."""
    index = np.arange(_STEP_WORDS, dtype=np.uint32)
    return index * np.uint32(POSITION_FACTORS[half]) + np.uint32(SEEDS[half]), _rotate_left(index, POSITION_ROTATIONS[half])


def _mix_all(words: Words, start: int, half: int, mixed: Words, spare: Words) -> None:
    """Mix words that follow each other from place ``start`` on, all in one step, with their positions, into ``mixed``."""
    place = start % _STEP_WORDS
    products, rotations = (table[place : place + len(words)] for table in _position_tables(half))
    base = (start - place) & _MASK_32
    # The bits of the base are above those of a place in a step, so that they rotate apart.
    np.add(products, np.uint32(base * POSITION_FACTORS[half] & _MASK_32), out=mixed)
    mixed ^= rotations
    mixed ^= _rotate_left(np.uint32(base), POSITION_ROTATIONS[half])
    mixed ^= words
    _mix32_in_place(mixed, spare)


def _mix32(value: Words) -> Words:
    mixed = value.copy()
    _mix32_in_place(mixed, np.empty_like(mixed))
    return mixed


def _mix32_in_place(value: Words, spare: Words) -> None:
    for shift, factor in MIX_STEPS:
        np.right_shift(value, np.uint32(shift), out=spare)
        value ^= spare
        if factor != 1:
            value *= np.uint32(factor)


def _rotate_left(value: Any, bits: int) -> Any:
    return (value << np.uint32(bits)) | (value >> np.uint32(32 - bits))


def _splitmix64(value: int) -> int:
    value ^= value >> 30
    value = (value * 0xBF58476D1CE4E5B9) & _MASK_64
    value ^= value >> 27
    value = (value * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)

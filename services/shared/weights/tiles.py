"""SGLang's hash on CUDA in numpy, stored so that a few changed words update it without reading the others.

Source: sglang/kernels/ops/memory/gpu_tensor_hash.py of SGLang 0.5.23. A parameter is cut into tiles of 8,192 words.
Each word is mixed with its position by two 32-bit hashes, and a tile's words are added up. The sums of each tile are mixed
with the parameter's length, and added up as 64 bits. A sum can be corrected: subtract the old word, add the new one.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import pairwise
from threading import Lock
from typing import Any, Final

import numpy as np

Words = np.ndarray[Any, np.dtype[np.uint32]]
Places = np.ndarray[Any, np.dtype[np.int64]]
_Piece = bytes | bytearray | memoryview
Work = Callable[[], None]
"""A part of some work: all parts may be done in any order and in any threads."""


def serially(work: Iterable[Work]) -> None:
    """Do ``work`` in this thread."""
    for each in work:
        each()


WORD_BYTES: Final = 4
TILE_WORDS: Final = 8192
_STEP_WORDS: Final = 16 * TILE_WORDS
"""A few arrays of this size stay in the cache; smaller ones would make threads wait for the interpreter's lock."""
_PIECE_BYTES: Final = 4 * _STEP_WORDS * WORD_BYTES
"""2 MiB: the smallest work of a thread."""
_DENSE_SHARE: Final = 1 / 4
"""Where more of the words have changed, it takes less time to hash all of them."""
_SEED: Final = 0x243F6A88
SEEDS: Final = (_SEED, ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF)
POSITION_FACTORS: Final = (0x27D4EB2D, 0x165667B1)
POSITION_ROTATIONS: Final = (15, 13)
MIX_STEPS: Final = ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1))
"""Shifts to the right, and the factors after them."""
_MASK_32: Final = 2**32 - 1
_MASK_64: Final = 2**64 - 1


class TileSums:
    """The sums of one parameter's tiles: 8 bytes for each 32 KiB of it."""

    def __init__(self, parts: Sequence[_Piece], do: Callable[[Iterable[Work]], object] = serially) -> None:
        """``parts``: the parameter's bytes, in pieces; they are read once, and never joined. ``do``: hashes them, or keeps
        that work for later."""
        self.num_bytes = sum(memoryview(part).nbytes for part in parts)
        num_words = -(-self.num_bytes // WORD_BYTES)
        self._sums = np.zeros((2, -(-num_words // TILE_WORDS)), dtype=np.uint32)
        # Two changes may end and begin within one tile.
        self._lock = Lock()
        do(partial(self._hash, begin, pieces) for begin, pieces in _cut(parts))

    def change(self, begin: int, old: _Piece, new: _Piece) -> None:
        """Replace the bytes from ``begin`` on, ``old``, by ``new`` of equal length; both ends lie between two words.

        Raises: ValueError when one does not.
        """
        serially(self.changes(begin, old, new))

    def changes(self, begin: int, old: _Piece, new: _Piece) -> list[Work]:
        """Return the work of ``change``. Raises: the same as ``change``."""
        before, after = memoryview(old).cast("B"), memoryview(new).cast("B")
        end = begin + len(before)
        if begin % WORD_BYTES or (end % WORD_BYTES and end != self.num_bytes):
            raise ValueError(f"bytes {begin} to {end} of {self.num_bytes} do not begin and end with a word")
        # Pieces end where tiles do.
        bounds = [begin, *range(begin + _PIECE_BYTES - begin % _PIECE_BYTES, end, _PIECE_BYTES), end]
        return [
            partial(self._renew, first, before[first - begin : last - begin], after[first - begin : last - begin])
            for first, last in pairwise(bounds)
        ]

    def checksum(self) -> str:
        """Return the hash of the whole parameter: 16 hexadecimal digits."""
        return sums_checksum(self._sums, self.num_bytes)

    def _hash(self, begin: int, pieces: Sequence[memoryview]) -> None:
        """Set the sums of whole tiles, or of those at the end, from the byte ``begin`` on."""
        words, first = _words(pieces[0] if len(pieces) == 1 else bytearray().join(pieces)), begin // WORD_BYTES
        scratch = np.empty((2, min(len(words), _STEP_WORDS)), dtype=np.uint32)
        bounds = [0, *range(_STEP_WORDS - first % _STEP_WORDS, len(words), _STEP_WORDS), len(words)]
        for start, end in pairwise(bounds):
            self._set(first + start, words[start:end], scratch)

    def _set(self, start: int, words: Words, scratch: Words) -> None:
        first = start // TILE_WORDS
        mixed, spare = scratch[:, : len(words)]
        whole = len(words) // TILE_WORDS
        for half in range(2):
            _mix_all(words, start, half, mixed, spare)
            sums = self._sums[half, first : first + -(-len(words) // TILE_WORDS)]
            tiles = mixed[: whole * TILE_WORDS].reshape(whole, TILE_WORDS)
            np.add.reduce(tiles, axis=1, dtype=np.uint32, out=sums[:whole])
            if whole < len(sums):
                sums[whole] = np.add.reduce(mixed[whole * TILE_WORDS :], dtype=np.uint32)

    def _renew(self, begin: int, old: memoryview, new: memoryview) -> None:
        """Replace words from the byte ``begin`` on: one by one where few of them differ, otherwise hash all."""
        before, after, first = _words(old), _words(new), begin // WORD_BYTES
        differs = before != after
        last = first + len(after)
        whole = not first % TILE_WORDS and (not last % TILE_WORDS or last * WORD_BYTES >= self.num_bytes)
        if whole and np.count_nonzero(differs) > _DENSE_SHARE * len(after):
            self._hash(begin, [new])
        else:
            found = np.flatnonzero(differs)
            self._correct(first, found, before[found], after[found])

    def _correct(self, first: int, found: Places, before: Words, after: Words) -> None:
        """Replace words at the places ``found``, ascending, after ``first``."""
        if not len(found):
            return
        tiles = np.arange(first // TILE_WORDS, (first + int(found[-1])) // TILE_WORDS + 1)
        bounds = np.append(np.searchsorted(found, tiles * TILE_WORDS - first), len(found))
        touched = bounds[1:] > bounds[:-1]
        tiles, bounds = tiles[touched], bounds[:-1][touched]
        index = (found + (first & _MASK_32)).astype(np.uint32)
        spare = np.empty_like(index)
        for half in range(2):
            was = index * np.uint32(POSITION_FACTORS[half])
            was += np.uint32(SEEDS[half])
            was ^= _rotate_left(index, POSITION_ROTATIONS[half])
            now = was ^ after
            was ^= before
            _mix32_in_place(was, spare)
            _mix32_in_place(now, spare)
            now -= was
            with self._lock:
                self._sums[half, tiles] += np.add.reduceat(now, bounds, dtype=np.uint32)


def sums_checksum(sums: Words, num_bytes: int) -> str:
    """Return the hash of a parameter of ``num_bytes`` from the sums of its tiles, [2, tiles]."""
    if not sums.shape[1]:
        return f"{0:016x}"
    length = np.uint32(-(-num_bytes // WORD_BYTES) * WORD_BYTES & _MASK_32)
    high, low = (_mix32(half ^ length).astype(np.uint64) for half in sums)
    return f"{_splitmix64(int(((high << np.uint64(32)) | low).sum(dtype=np.uint64))):016x}"


def tiled_checksum(parts: Sequence[_Piece]) -> str:
    """Compute SGLang's hash on CUDA of a parameter's bytes, in pieces."""
    return TileSums(parts).checksum()


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

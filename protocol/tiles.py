"""Sums of tiles: a hash of weights that adds up over any partition, so that each process can hash the part that it has.

A tensor's bytes are cut into tiles of TILE_BYTES from its beginning; the last one is padded with zeros. A tile's sum is

    S = sum over its words w_j of A_j w_j + B_j (w_j >> 32)  mod 2^64,    A_j and B_j odd, fixed pseudo-random numbers

(little-endian words of 64 bits): a multilinear hash of its halves of 32 bits. A change within one half is always found. Any
other change is missed with a probability of at most 2^-32, over the choice of the numbers: two odd multipliers of 63 random
bits agree on differences below 2^32 that seldom. It is no defence against somebody who knows the numbers.

Sums of disjoint parts of a tile (zeros elsewhere, cut between any two bits) add up to that of the whole: nothing is carried.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

import numpy as np

TILE_BYTES: Final = 32 * 1024
TILE_WORDS: Final = TILE_BYTES // 8
_STEP_TILES: Final = 16
"""So many are computed at a time: their words and halves stay in a core's cache."""
_HALF: Final = np.uint64(32)

Sums = np.ndarray[Any, np.dtype[np.uint64]]


def _multipliers() -> tuple[Sums, Sums]:
    text = hashlib.shake_256(b"gspo tile sums").digest(2 * TILE_BYTES)
    first, second = np.frombuffer(text, dtype="<u8").reshape(2, TILE_WORDS) | np.uint64(1)
    return first, second


WORD_FACTORS, HALF_FACTORS = _multipliers()
"""A and B: uint64 [TILE_WORDS]."""


def num_tiles(num_bytes: int) -> int:
    """Return how many tiles so many bytes have."""
    return -(-num_bytes // TILE_BYTES)


def tile_sums(data: bytes | bytearray | memoryview) -> Sums:
    """Compute the sums of a tensor's tiles: uint64 [number of tiles]."""
    raw = np.frombuffer(data, dtype=np.uint8)
    sums = np.empty(num_tiles(len(raw)), dtype=np.uint64)
    whole = len(raw) // TILE_BYTES
    words = raw[: whole * TILE_BYTES].view("<u8").reshape(whole, TILE_WORDS)
    for first in range(0, whole, _STEP_TILES):
        step = words[first : first + _STEP_TILES]
        sums[first : first + len(step)] = _sums(step)
    if whole < len(sums):
        last = np.zeros(TILE_BYTES, dtype=np.uint8)
        last[: len(raw) - whole * TILE_BYTES] = raw[whole * TILE_BYTES :]
        sums[whole:] = _sums(last.view("<u8").reshape(1, TILE_WORDS))
    return sums


def _sums(words: Sums) -> Sums:
    """uint64 [tiles]."""
    # einsum multiplies and adds in one pass, and wraps.
    sums: Sums = np.einsum("tw,w->t", words, WORD_FACTORS)
    sums += np.einsum("tw,w->t", words >> _HALF, HALF_FACTORS)
    return sums

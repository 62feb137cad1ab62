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


def tile_sums(data: bytes | bytearray | memoryview, lead: int = 0) -> Sums:
    """Compute the sums of the tiles of a tensor, or of a part of one: uint64 [tiles that it touches].

    ``lead``: bytes of the first tile that come before the part, below TILE_BYTES.
    """
    raw = np.frombuffer(data, dtype=np.uint8)
    ahead = min(len(raw), TILE_BYTES - lead) if lead else 0
    sums = np.empty(num_tiles(lead + len(raw)) if len(raw) else 0, dtype=np.uint64)
    if ahead:
        sums[:1] = _padded(raw[:ahead], lead)
    raw, rest = raw[ahead:], sums[bool(ahead) :]
    whole = len(raw) // TILE_BYTES
    words = raw[: whole * TILE_BYTES].view("<u8").reshape(whole, TILE_WORDS)
    for first in range(0, whole, _STEP_TILES):
        step = words[first : first + _STEP_TILES]
        rest[first : first + len(step)] = _sums(step)
    if whole < len(rest):
        rest[whole:] = _padded(raw[whole * TILE_BYTES :], 0)
    return sums


def _padded(raw: np.ndarray[Any, np.dtype[np.uint8]], lead: int) -> Sums:
    """uint64 [1], of a part of one tile."""
    tile = np.zeros(TILE_BYTES, dtype=np.uint8)
    tile[lead : lead + len(raw)] = raw
    return _sums(tile.view("<u8").reshape(1, TILE_WORDS))


def _sums(words: Sums) -> Sums:
    """uint64 [tiles]."""
    # einsum multiplies and adds in one pass, and wraps.
    sums: Sums = np.einsum("tw,w->t", words, WORD_FACTORS)
    sums += np.einsum("tw,w->t", words >> _HALF, HALF_FACTORS)
    return sums

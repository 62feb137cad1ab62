"""The hash behind SGLang's seeded sampling, in NumPy.

SGLang draws the Gumbel noise of (seed, position, token id) from MurmurHash3 (x86, 32 bit, hash seed 0) of those 16 bytes,
with a Triton kernel or a compiled CPU operation; neither exists here. This gives the same integers, hence the same samples.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

Words = NDArray[np.uint32]

NUM_BYTES: Final = np.uint32(16)
AT_ONCE: Final = 2**16
"""Words that are mixed at a time: they and their copy stay in a core's cache."""


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """Hash every (row, column): seed uint64 [n], positions int [n], col_indices int [m]; int64 [n, m] below 2^32."""
    seed_n = seed.view(torch.int64).numpy().view(np.uint64)
    state_n = np.zeros(len(seed_n), np.uint32)
    for block in (_words(seed_n), _words(seed_n >> np.uint64(32)), _words(positions.to(torch.int64).numpy())):
        _mix(state_n, _scrambled(block), np.empty_like(state_n))
    # The vocabulary is mixed in last, and its part is the same for all rows.
    columns_m = _scrambled(_words(col_indices.to(torch.int64).numpy()))
    hash_nm = np.empty((len(state_n), len(columns_m)), np.uint32)
    rows = max(1, AT_ONCE // max(1, len(columns_m)))
    spare = np.empty((rows, len(columns_m)), np.uint32)
    for start in range(0, len(state_n), rows):
        part = hash_nm[start : start + rows]
        part[:] = state_n[start : start + rows, None]
        _mix(part, columns_m, spare[: len(part)])
        part ^= NUM_BYTES
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
            part ^= np.right_shift(part, np.uint32(shift), out=spare[: len(part)])
            part *= np.uint32(factor)
    return torch.from_numpy(hash_nm).to(torch.int64)


def _words(values: NDArray[Any]) -> Words:
    """The lower 32 bits."""
    return values.astype(np.uint32)


def _scrambled(block: Words) -> Words:
    block = block * np.uint32(0xCC9E2D51)
    _rotate_left(block, 15, np.empty_like(block))
    return block * np.uint32(0x1B873593)


def _mix(state: Words, block: Words, spare: Words) -> None:
    """In place; ``spare`` is as large as ``state``."""
    state ^= block
    _rotate_left(state, 13, spare)
    state *= np.uint32(5)
    state += np.uint32(0xE6546B64)


def _rotate_left(value: Words, bits: int, spare: Words) -> None:
    np.left_shift(value, np.uint32(bits), out=spare)
    value >>= np.uint32(32 - bits)
    value |= spare

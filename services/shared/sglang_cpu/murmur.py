"""The hash behind SGLang's seeded sampling, in plain torch.

SGLang draws the Gumbel noise of (seed, position, token id) from MurmurHash3 (x86, 32 bit, hash seed 0) of those 16 bytes,
with a Triton kernel or a compiled CPU operation; neither exists here. This gives the same integers, hence the same samples.
"""

import torch

_MASK = 0xFFFFFFFF
_NUM_BYTES = 16


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """Hash every (row, column): seed uint64 [n], positions int [n], col_indices int [m]; int64 [n, m] below 2^32."""
    seed_n1 = seed.view(torch.int64)[:, None]
    hash_nm = torch.zeros(1, 1, dtype=torch.int64)
    # Broadcasting keeps the first three blocks at one column, so the vocabulary is mixed in only once.
    for block in (
        seed_n1 & _MASK,
        (seed_n1 >> 32) & _MASK,
        positions.to(torch.int64)[:, None] & _MASK,
        col_indices.to(torch.int64)[None] & _MASK,
    ):
        hash_nm = _mix(hash_nm, block)
    hash_nm = hash_nm ^ _NUM_BYTES
    hash_nm = ((hash_nm ^ (hash_nm >> 16)) * 0x85EBCA6B) & _MASK
    hash_nm = ((hash_nm ^ (hash_nm >> 13)) * 0xC2B2AE35) & _MASK
    return hash_nm ^ (hash_nm >> 16)


def _mix(state: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    block = (block * 0xCC9E2D51) & _MASK
    block = (_rotate_left(block, 15) * 0x1B873593) & _MASK
    return (_rotate_left(state ^ block, 13) * 5 + 0xE6546B64) & _MASK


def _rotate_left(value: torch.Tensor, bits: int) -> torch.Tensor:
    return ((value << bits) | (value >> (32 - bits))) & _MASK

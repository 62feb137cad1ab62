"""SGLang's 32-bit hash of words and their places, in torch (``shared.weights.tiles`` has it in numpy).

PyTorch knows few operations on unsigned integers: here they are signed ones, whose sums and products wrap alike, and whose
shifts are masked.
"""

import torch
from torch import Tensor

from gspo_services.shared.weights import MIX_STEPS, POSITION_FACTORS, POSITION_ROTATIONS, SEEDS


def mixed(words: Tensor | int, first: int, length: int, half: int, device: torch.device) -> Tensor:
    """Mix words with their places, from ``first`` on: int32 [length]. ``half``: 0 or 1, which of the two hashes.

    ``words``: int32 [length], or one word for all places, from 0 to 2^32 - 1.
    """
    places = torch.arange(first, first + length, dtype=torch.int64, device=device).to(torch.int32)
    bits = POSITION_ROTATIONS[half]
    found = places * _signed(POSITION_FACTORS[half])
    found += _signed(SEEDS[half])
    found ^= (places << bits) | ((places >> (32 - bits)) & ((1 << bits) - 1))
    found ^= words if isinstance(words, Tensor) else _signed(words)
    for shift, factor in MIX_STEPS:
        found ^= (found >> shift) & ((1 << (32 - shift)) - 1)
        if factor != 1:
            found *= _signed(factor)
    return found


def _signed(value: int) -> int:
    """Return the signed integer of 32 bits with these bits."""
    return value - (1 << 32) if value >= 1 << 31 else value

"""Masters that begin anywhere in what rounds to a bfloat16 weight, and not all in its middle.

A bfloat16 model's float32 masters begin as its weights: each in the middle of the values that round to it. A step that is
small beside bfloat16's spacing then changes no weight, nor do the next ones, until they add up to half the spacing. At a
learning rate of 1e-5 that takes twelve steps for a weight of 0.05. Spread evenly over these values, a step carries as many
masters over a border as its size says (dithering, known from audio), and the start model is the same to the bit.
docs/evidence/study.md (question l) has what it makes of a run.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

import torch
from torch import Tensor

STEP: Final = 1 << 22
"""Elements at a time: temporary tensors take some 40 bytes for each."""
SPACING_EXPONENT: Final = 8
"""A bfloat16 value m 2^e with m in [1/2, 1) lies 2^(e - 8) from the next one."""
_SEED: Final = 0x243F6A88
_FACTOR: Final = 0x27D4EB2D
_ROTATION: Final = 15
_STEPS: Final = ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1))
"""Shifts to the right, and the factors after them."""
INSIDE: Final = 0.999
"""A value just on a border would round by the rule for ties."""


@torch.no_grad()
def spread(masters: Tensor, name: str, first: int, seed: int, *, evenly: bool = True) -> None:
    """Move masters within what rounds to the same bfloat16 value; a 0 stays one.

    The same numbers come out however ranks share a parameter.

    Args:
        masters: float32 [n], bfloat16 values; changed in place.
        name: of the parameter, or of its piece (``gspo.moe.expert_layout``).
        first: the place of the first of them in it, flattened, with the rows of all ranks.
        evenly: False: as in runs that were recorded before this was mended. There a power of two, as in a layer norm, fell
            1.5 times as far as its steps.
    """
    word = int.from_bytes(blake2b(f"{seed}:{name}".encode(), digest_size=4).digest(), "big")
    for begin in range(0, masters.numel(), STEP):
        part = masters[begin : begin + STEP]
        bits = _noise(word, first + begin, part.numel(), part.device)
        mantissa, exponent = torch.frexp(part)
        shift = torch.ldexp(bits.float() * (INSIDE * 2.0**-32), exponent - SPACING_EXPONENT)
        # Below a power of two the spacing is half as wide: twice as many masters on each part of it move half as far.
        narrow = (mantissa.abs() == 0.5) & (shift * mantissa < 0) if evenly else ~_round_alike(part + shift, part)
        moved = torch.where(narrow, part + shift / 2, part + shift)
        part.copy_(torch.where(part == 0, part, moved))


def _round_alike(left: Tensor, right: Tensor) -> Tensor:
    return left.bfloat16() == right.bfloat16()


def _noise(word: int, first: int, length: int, device: torch.device) -> Tensor:
    """Mix ``word`` with places, from ``first`` on, as SGLang's hash on CUDA does: int32 [length].

    PyTorch knows few operations on unsigned integers: here they are signed ones, whose sums and products wrap alike, and
    whose shifts are masked.
    """
    places = torch.arange(first, first + length, dtype=torch.int64, device=device).to(torch.int32)
    found = places * _signed(_FACTOR)
    found += _signed(_SEED)
    found ^= (places << _ROTATION) | ((places >> (32 - _ROTATION)) & ((1 << _ROTATION) - 1))
    found ^= _signed(word)
    for shift, factor in _STEPS:
        found ^= (found >> shift) & ((1 << (32 - shift)) - 1)
        if factor != 1:
            found *= _signed(factor)
    return found


def _signed(value: int) -> int:
    """Return the signed integer of 32 bits with these bits."""
    return value - (1 << 32) if value >= 1 << 31 else value

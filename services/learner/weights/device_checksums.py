"""SGLang's hash of a parameter, computed by the device that trains, which does so as fast as the bytes arrive.

They go there in steps, and none stays. The formula is that of ``shared.weights.tiles``.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from gspo_services.shared.weights import (
    MIX_STEPS,
    POSITION_FACTORS,
    POSITION_ROTATIONS,
    SEEDS,
    TILE_WORDS,
    WORD_BYTES,
    sums_checksum,
)


def mixed(words: Tensor | int, first: int, length: int, half: int, device: torch.device) -> Tensor:
    """Mix words with their places, from ``first`` on: int32 [length]. ``half``: 0 or 1, which of the two hashes.

    PyTorch knows few operations on unsigned integers: here they are signed ones, whose sums and products wrap alike, and
    whose shifts are masked.
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


STEP_WORDS: Final = 512 * TILE_WORDS
"""16 MiB; four arrays of this size are all that the device has to have room for."""


class DeviceChecksums:
    """Hashes on a stream of its own, so that training goes on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def checksum(self, parts: Sequence[bytes | bytearray | memoryview]) -> str:
        """Compute the hash of a parameter's bytes, in pieces: ``shared.weights.tiles.tiled_checksum``.

        Raises: OutOfMemoryError where training has left the device no room.
        """
        pieces = [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]
        num_bytes = sum(map(len, pieces))
        num_words = -(-num_bytes // WORD_BYTES)
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            # On this stream, like all that follows: another may be behind.
            sums = torch.zeros((2, -(-num_words // TILE_WORDS)), dtype=torch.int32, device=self._device)
            rest = pieces
            for first in range(0, num_words, STEP_WORDS):
                words, rest = self._step(rest, min(STEP_WORDS, num_words - first))
                place = slice(first // TILE_WORDS, -(-(first + len(words)) // TILE_WORDS))
                for half in range(2):
                    found = pad(mixed(words, first, len(words), half, self._device), (0, -len(words) % TILE_WORDS))
                    sums[half, place] = found.view(-1, TILE_WORDS).sum(dim=1, dtype=torch.int32)
            host = sums.cpu().numpy().view(np.uint32)
        return sums_checksum(host, num_bytes)

    def _step(self, rest: list[memoryview], num_words: int) -> tuple[Tensor, list[memoryview]]:
        """The next words on the device, the last one with zeros after its bytes; and what is left of the pieces."""
        words = torch.zeros(num_words, dtype=torch.int32, device=self._device)
        target, place = words.view(torch.uint8), 0
        while rest and place < num_words * WORD_BYTES:
            piece = rest[0][: num_words * WORD_BYTES - place]
            target[place : place + len(piece)].copy_(torch.frombuffer(piece, dtype=torch.uint8))
            place += len(piece)
            rest = [rest[0][len(piece) :], *rest[1:]] if len(piece) < len(rest[0]) else rest[1:]
        return words, rest

"""The hash of a parameter as a device computes it, here a CPU's tensors, is that of the host and of the formula."""

import random
from itertools import pairwise

import pytest
import torch

from gspo_services.learner.weights import device_checksums
from gspo_services.learner.weights.device_checksums import DeviceChecksums
from gspo_services.shared.weights.tiles import TILE_WORDS, tiled_checksum

TILE = 4 * TILE_WORDS
SIZES = (0, 1, 2, 3, 4, 5, TILE - 1, TILE, TILE + 1, 2 * TILE, 2 * TILE + 1, 3 * TILE + 2, 4 * TILE + 4, 6 * TILE - 3)


@pytest.mark.parametrize("size", SIZES)
def test_a_parameter_in_any_pieces_has_the_hash_of_its_bytes(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Steps of two tiles, so that pieces begin and end within one, at its ends, and over several.
    monkeypatch.setattr(device_checksums, "STEP_WORDS", 2 * TILE_WORDS)
    rng = random.Random(size)
    data, hashes = memoryview(bytearray(rng.randbytes(size))), DeviceChecksums(torch.device("cpu"))
    for _ in range(3):
        cuts = [0, *sorted(rng.randint(0, size) for _ in range(3)), size]
        parts = [data[begin:end] for begin, end in pairwise(cuts)]
        assert hashes.checksum(parts) == tiled_checksum([data])
    if size:
        data[-1] ^= 1
        assert hashes.checksum([data]) == tiled_checksum([data]) != tiled_checksum([data[:-1], bytes([data[-1] ^ 1])])

"""The sums of tiles: defined, additive over any partition, and different after any damage."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_protocol.digests import VERSION_KIND, tensor_digest, version_digest, version_kind
from gspo_protocol.messages import TensorInfo
from gspo_protocol.tiles import HALF_FACTORS, TILE_BYTES, TILE_WORDS, WORD_FACTORS, num_tiles, tile_sums

RANDOM = np.random.default_rng(0)
WRAP = 2**64


def some_bytes(number: int) -> bytearray:
    return bytearray(RANDOM.bytes(number))


def summed(tile: bytes) -> int:
    """The definition, word by word."""
    words = [int.from_bytes(tile[at : at + 8], "little") for at in range(0, len(tile), 8)]
    factors = zip(words, WORD_FACTORS.tolist(), HALF_FACTORS.tolist(), strict=False)
    return sum(a * word + b * (word >> 32) for word, a, b in factors) % WRAP


@pytest.mark.parametrize(
    "number", [0, 1, 7, 8, 9, TILE_BYTES - 1, TILE_BYTES, TILE_BYTES + 1, 3 * TILE_BYTES, 20 * TILE_BYTES + 5]
)
def test_sums_are_those_of_the_definition(number: int) -> None:
    data = some_bytes(number)
    expected = [summed(bytes(data[at : at + TILE_BYTES])) for at in range(0, number, TILE_BYTES)]
    assert tile_sums(data).tolist() == expected
    assert len(expected) == num_tiles(number)


def test_no_factor_lets_a_change_of_one_half_pass() -> None:
    """It would have to be even."""
    assert (WORD_FACTORS % 2).all()
    assert (HALF_FACTORS % 2).all()
    # A high half counts with A 2^32 + B.
    assert ((WORD_FACTORS << np.uint64(32)) + HALF_FACTORS).astype(np.uint64).min() > 0
    assert len(set(WORD_FACTORS.tolist()) | set(HALF_FACTORS.tolist())) == 2 * TILE_WORDS


@given(st.integers(0, 2 * TILE_BYTES + 9), st.lists(st.integers(0, 2 * TILE_BYTES + 9), max_size=4), st.integers(0, 2**32))
def test_parts_add_up_wherever_they_are_cut(number: int, cuts: list[int], seed: int) -> None:
    data = np.frombuffer(np.random.default_rng(seed).bytes(number), dtype=np.uint8)
    whole = np.zeros(num_tiles(number), dtype=np.uint64)
    ends = sorted({0, number, *(cut for cut in cuts if cut < number)})
    for begin, end in pairwise(ends):
        alone = np.zeros_like(data)
        alone[begin:end] = data[begin:end]
        whole += tile_sums(alone.data)
    assert (whole == tile_sums(data.data)).all()


def test_every_flipped_bit_is_found() -> None:
    data = some_bytes(TILE_BYTES + 100)
    digest = tensor_digest(data)
    for place in [*range(0, len(data), 997), *range(TILE_BYTES - 9, len(data))]:
        for bit in range(8):
            data[place] ^= 1 << bit
            assert tensor_digest(data) != digest, (place, bit)
            data[place] ^= 1 << bit
    assert tensor_digest(data) == digest


def test_every_pair_of_flipped_signs_is_found() -> None:
    """Odd factors of whole words would miss each of them."""
    data = np.frombuffer(bytes(some_bytes(TILE_BYTES)), dtype=np.uint16).copy()
    expected = tile_sums(data.tobytes())
    places = RANDOM.permutation(len(data))[:2000].reshape(-1, 2)
    for pair in [*places, *((np.arange(8).reshape(-1, 2) * 4) + 3)]:
        data[pair] ^= 0x8000
        assert (tile_sums(data.tobytes()) != expected).any(), pair
        data[pair] ^= 0x8000


@pytest.mark.parametrize("kind", ["swapped tiles", "swapped elements", "shifted", "truncated", "longer", "a stale tile"])
def test_damage_in_every_place_is_found(kind: str) -> None:
    tiles = 5
    data = some_bytes(tiles * TILE_BYTES)
    former = some_bytes(len(data))
    digest = tensor_digest(data)
    for tile in range(tiles):
        begin, end = tile * TILE_BYTES, (tile + 1) * TILE_BYTES
        other = bytearray(data)
        if kind == "swapped tiles":
            after = (tile + 1) % tiles * TILE_BYTES
            other[begin:end], other[after : after + TILE_BYTES] = data[after : after + TILE_BYTES], data[begin:end]
        elif kind == "swapped elements":
            other[begin : begin + 2], other[begin + 8 : begin + 10] = data[begin + 8 : begin + 10], data[begin : begin + 2]
        elif kind == "shifted":
            other[begin + 2 : end] = data[begin : end - 2]
        elif kind == "truncated":
            other = other[: len(data) - 2 - tile]
        elif kind == "longer":
            other += bytes(tile + 1)
        else:
            other[begin:end] = former[begin:end]
        assert tensor_digest(other) != digest, tile


def test_zeros_at_the_end_count_although_tiles_are_padded_with_them() -> None:
    assert tensor_digest(bytes(4)) != tensor_digest(bytes(6))
    assert tile_sums(bytes(4)) == tile_sums(bytes(6))


def test_bits_count_and_not_values() -> None:
    """NaN is not NaN, and -0.0 is 0.0."""
    bits = np.array([0x7FC0, 0x7FC1, 0x0000, 0x8000], dtype=np.uint16)
    assert len({tensor_digest(each.tobytes()) for each in bits}) == len(bits)


def test_a_version_is_the_same_in_whatever_order_its_tensors_lie() -> None:
    infos = [TensorInfo(name, "bfloat16", [1], at, 2, tensor_digest(bytes([at, 1]))) for at, name in enumerate("bca")]
    digest = version_digest(infos)
    assert digest == version_digest(sorted(infos, key=lambda each: each.name))
    assert version_kind(digest) == VERSION_KIND
    assert version_kind("ab" * 32) == 1, "of gspo 0.1.0"

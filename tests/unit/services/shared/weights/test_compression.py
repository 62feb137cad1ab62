"""zstd, with a bound on its output."""

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from gspo_services.shared.weights.compression import compress, decompress


@given(st.binary())
def test_compressed_data_comes_out_again(data: bytes) -> None:
    assert decompress(compress(data), len(data)) == data


def test_another_length_than_expected_is_refused_before_memory_is_taken() -> None:
    bomb = compress(bytes(10_000_000))
    assert len(bomb) < 2000
    with pytest.raises(ValueError, match="holds 10000000 bytes, 10 expected"):
        decompress(bomb, 10)
    with pytest.raises(ValueError, match="holds 3 bytes, 4 expected"):
        decompress(compress(b"abc"), 4)


def test_a_frame_that_hides_its_length_is_refused() -> None:
    hidden = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(10_000_000))
    with pytest.raises(ValueError, match="holds -1 bytes, 10 expected"):
        decompress(hidden, 10)


@given(st.binary(max_size=64), st.integers(0, 100))
def test_any_other_bytes_are_a_value_error(data: bytes, num_bytes: int) -> None:
    try:
        content = decompress(data, num_bytes)
    except ValueError:
        return
    assert len(content) == num_bytes


def test_damage_and_trailing_bytes_are_refused() -> None:
    frame = compress(b"0123456789" * 10)
    with pytest.raises(ValueError, match="damaged"):
        decompress(frame[:-3], 100)
    with pytest.raises(ValueError, match="damaged"):
        decompress(frame + b"x", 100)

"""The files that the engine loads, and patches."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from gspo_protocol.messages import TensorInfo
from gspo_services.rollout.weights.file import header_of, write_arrays


def described(name: str, array: np.ndarray) -> TensorInfo:
    return TensorInfo(name, str(array.dtype), list(array.shape), 0, array.nbytes, "0" * 64)  # type: ignore[arg-type]


def test_the_safetensors_package_reads_what_was_written(tmp_path: Path) -> None:
    arrays = {
        "a": np.arange(6, dtype="<f4").reshape(2, 3),
        "b": np.array([1.5, -2], dtype="<f2"),
        "empty": np.zeros((0, 4), "<f4"),
    }
    tensors = [described(name, array) for name, array in arrays.items()]
    content = header_of(tensors) + b"".join(array.tobytes() for array in arrays.values())
    (tmp_path / "x.safetensors").write_bytes(content)
    loaded = load_file(tmp_path / "x.safetensors")
    assert set(loaded) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name], array)
        assert loaded[name].dtype == array.dtype
    with pytest.raises(ValueError, match="a occurs twice"):
        header_of([tensors[0], tensors[0]])
    with pytest.raises(ValueError, match="surrogates"):
        header_of([described("half a pair \ud800", arrays["a"])])


def test_arrays_in_pieces_become_one(tmp_path: Path) -> None:
    pieces = [np.array([3, 1], np.int32), np.array([], np.int32), np.arange(9, dtype=np.int32)[::2]]
    bits = [np.array([65535, 1], np.uint16)]
    num_bytes = write_arrays(tmp_path / "p.safetensors", {"w.indices": pieces, "w.values": bits})
    assert num_bytes == (tmp_path / "p.safetensors").stat().st_size
    loaded = load_file(tmp_path / "p.safetensors")
    assert loaded["w.indices"].tolist() == [3, 1, 0, 2, 4, 6, 8]
    assert loaded["w.values"].tolist() == [65535, 1]

"""The file that the engine loads."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from protocol.messages import TensorInfo
from services.rollout.weights.file import write_safetensors


def test_the_safetensors_package_reads_what_was_written(tmp_path: Path) -> None:
    arrays = {
        "a": np.arange(6, dtype="<f4").reshape(2, 3),
        "b": np.array([1.5, -2], dtype="<f2"),
        "empty": np.zeros((0, 4), "<f4"),
    }
    tensors = [
        (
            TensorInfo(
                name=name, dtype=str(array.dtype), shape=list(array.shape), offset=0, num_bytes=array.nbytes, digest="0" * 64  # type: ignore[arg-type]
            ),
            memoryview(array.tobytes()),
        )
        for name, array in arrays.items()
    ]  # fmt: skip
    write_safetensors(tmp_path / "x.safetensors", tensors)
    loaded = load_file(tmp_path / "x.safetensors")
    assert set(loaded) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name], array)
        assert loaded[name].dtype == array.dtype
    with pytest.raises(ValueError, match="a occurs twice"):
        write_safetensors(tmp_path / "y", [tensors[0], tensors[0]])
    with pytest.raises(ValueError, match="23 bytes"):
        write_safetensors(tmp_path / "y", [(tensors[0][0], tensors[0][1][:-1])])

"""A version in mapped files: the same bytes however they are cut, for this process, the next one, and the engine."""

import resource
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from gspo_protocol.messages import TensorInfo
from gspo_services.rollout.weights.files import WeightFiles
from gspo_services.shared.runtime.errors import ServiceError

SIZES = [40, 0, 6, 2, 300, 0, 64, 2, 10]
TOTAL = sum(SIZES)
CONTENT = np.random.default_rng(0).integers(0, 256, TOTAL, dtype=np.uint8)


def described() -> list[TensorInfo]:
    ends = np.cumsum([0, *SIZES]).tolist()
    return [TensorInfo(f"t{at}", "float16", [size // 2], ends[at], size, "0" * 64) for at, size in enumerate(SIZES)]


def filled(directory: Path | None, shard_bytes: int, chunk: int = 37) -> WeightFiles:
    files = WeightFiles(described(), directory, shard_bytes)
    for begin in reversed(range(0, TOTAL, chunk)):
        files.put(begin, CONTENT[begin : begin + chunk].copy().data)
    files.map()
    return files


@settings(deadline=None, max_examples=50)
@given(
    st.integers(1, TOTAL),
    st.integers(1, 100),
    st.sets(st.integers(0, TOTAL // 2 - 1), min_size=1),
    st.integers(0, TOTAL),
    st.integers(0, TOTAL),
)
def test_bytes_and_elements_do_not_depend_on_where_files_end(
    shard_bytes: int, chunk: int, chosen: set[int], one: int, other: int
) -> None:
    files = filled(None, shard_bytes, chunk)
    expected = CONTENT.copy()
    begin, end = sorted((one, other))
    assert files.read(begin, end).tobytes() == expected[begin:end].tobytes()
    places = np.array(sorted(chosen))
    elements = expected.view("<u2")
    assert files.gather(0, 2, places).tolist() == elements[places].tolist()
    first = int(places[0])
    assert files.gather(2 * first, 2, (places - first).astype(np.uint32)).tolist() == elements[places].tolist()
    values = np.arange(len(places), dtype=np.uint16)
    files.scatter(2 * first, 2, places - first, values)
    elements[places] = values
    assert files.read(0, TOTAL).tobytes() == expected.tobytes()
    assert b"".join(files.tensor(at) for at in range(len(SIZES))) == expected.tobytes()


def test_an_engine_gets_the_files_that_have_the_tensors_and_no_copy(tmp_path: Path) -> None:
    files = filled(tmp_path, 50)
    loads = tmp_path / "loads"
    loads.mkdir()
    files.link(loads, [4, 7])
    read = {name: array for path in loads.iterdir() for name, array in load_file(path).items()}
    assert {"t4", "t7"} <= set(read)
    assert "t0" not in read
    for info in described():
        if info.name in read:
            assert read[info.name].tobytes() == CONTENT[info.offset : info.offset + info.num_bytes].tobytes()
    linked = next(loads.iterdir())
    assert linked.stat().st_ino == (tmp_path / linked.name).stat().st_ino
    with pytest.raises(ValueError, match="without a directory"):
        filled(None, 50).link(loads, [0])


def test_the_next_process_reads_and_changes_the_same_bytes(tmp_path: Path) -> None:
    filled(tmp_path, 50).scatter(0, 2, np.array([0]), np.array([7], np.uint16))
    again = WeightFiles(described(), tmp_path, 50)
    again.reopen()
    assert again.read(0, 2).view("<u2")[0] == 7
    assert again.read(2, TOTAL).tobytes() == CONTENT[2:].tobytes()
    for path in sorted(tmp_path.iterdir())[:1]:
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="or another header; this version has"):
        WeightFiles(described(), tmp_path, 50).reopen()


def test_no_room_is_found_while_bytes_arrive_and_never_later(tmp_path: Path) -> None:
    files = WeightFiles(described(), tmp_path, TOTAL)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(ServiceError, match=r"424 bytes.*choose another rollout\.weights_directory"):
            files.put(0, CONTENT.data)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        files.close()


def test_a_description_alone_takes_no_room(tmp_path: Path) -> None:
    huge = [TensorInfo("t", "float16", [2**52], 0, 2**53, "0" * 64)]
    WeightFiles(huge, tmp_path)
    assert list(tmp_path.iterdir()) == []

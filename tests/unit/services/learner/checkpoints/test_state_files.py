"""Tensors in one file or several, read by rows."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gspo_services.learner.checkpoints.format import CheckpointError
from gspo_services.learner.checkpoints.state_files import TensorDirectory, read_steps, write_steps, write_tensors

WHOLE = torch.arange(24.0).reshape(6, 4)


def written(directory: Path, num_files: int) -> TensorDirectory:
    rows = 6 // num_files
    for index in range(num_files):
        part = WHOLE[index * rows : (index + 1) * rows]
        write_tensors(directory, f"slab.{index}-of-{num_files}", {"slab/weight": part}, first_row=index * rows)
    return TensorDirectory(directory)


@pytest.mark.parametrize("num_files", [1, 2, 3, 6])
@pytest.mark.parametrize(("first", "rows"), [(0, 6), (0, 2), (2, 2), (3, 3), (1, 4), (5, 1)])
def test_rows_are_read_from_whichever_files_hold_them(tmp_path: Path, num_files: int, first: int, rows: int) -> None:
    found = written(tmp_path, num_files).read("slab/weight", first, rows, (rows, 4))
    assert torch.equal(found, WHOLE[first : first + rows])


def test_twelve_parts_are_in_the_order_of_their_rows_and_not_of_their_names(tmp_path: Path) -> None:
    rows = torch.arange(12.0)[:, None]
    for index in range(12):
        write_tensors(tmp_path, f"slab.{index}-of-12", {"slab/weight": rows[index : index + 1]}, first_row=index)
    assert torch.equal(TensorDirectory(tmp_path).read("slab/weight", 1, 11, (11, 1)), rows[1:])


def test_a_file_that_disappears_while_it_is_read_is_named(tmp_path: Path) -> None:
    files = written(tmp_path, 1)
    (tmp_path / "slab.0-of-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"slab\.0-of-1\.safetensors is damaged: .*No such file"):
        files.read("slab/weight", 0, 6, (6, 4))


@pytest.mark.parametrize(
    "metadata", [None, {"first_row": ""}, {"first_row": "-1"}, {"first_row": "٣"}, {"first_row": "9" * 10}]
)
def test_a_file_that_does_not_say_which_rows_it_holds_is_refused(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    save_file({"slab/weight": WHOLE}, tmp_path / "slab.safetensors", metadata=metadata)
    with pytest.raises(CheckpointError, match=r"slab\.safetensors says first_row = "):
        TensorDirectory(tmp_path)


def test_a_missing_file_is_noticed_wherever_its_rows_were(tmp_path: Path) -> None:
    for missing in range(3):
        written(tmp_path, 3)
        (tmp_path / f"slab.{missing}-of-3.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"has no rows \d to 6 of slab/weight"):
            TensorDirectory(tmp_path).read("slab/weight", 0, 6, (6, 4))
        other = (missing + 1) % 3
        rows = TensorDirectory(tmp_path).read("slab/weight", 2 * other, 2, (2, 4))
        assert torch.equal(rows, WHOLE[2 * other : 2 * other + 2])


def test_a_tensor_of_another_name_shape_or_type_is_refused(tmp_path: Path) -> None:
    files = written(tmp_path, 1)
    with pytest.raises(CheckpointError, match="has no rows 0 to 6 of slab/exp_avg"):
        files.read("slab/exp_avg", 0, 6, (6, 4))
    with pytest.raises(CheckpointError, match=r"slab/weight is torch.float32 \[6, 4\], this learner has float32 \[6, 5\]"):
        files.read("slab/weight", 0, 6, (6, 5))
    write_tensors(tmp_path, "half", {"half/weight": WHOLE.bfloat16()})
    with pytest.raises(CheckpointError, match=r"half/weight is torch.bfloat16"):
        TensorDirectory(tmp_path).read("half/weight", 0, 6, (6, 4))


@pytest.mark.parametrize("damage", [b"", b"\xff" * 64])
def test_a_damaged_file_is_named(tmp_path: Path, damage: bytes) -> None:
    written(tmp_path, 1)
    (tmp_path / "slab.0-of-1.safetensors").write_bytes(damage)
    with pytest.raises(CheckpointError, match=r"slab\.0-of-1\.safetensors is damaged"):
        TensorDirectory(tmp_path)


def test_a_file_that_cannot_be_written_is_an_operating_systems_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"gone/slab\.safetensors: .*No such file"):
        write_tensors(tmp_path / "gone", "slab", {"slab/weight": WHOLE})


def test_columns_of_a_tensor_are_written_as_they_are(tmp_path: Path) -> None:
    write_tensors(tmp_path, "columns", {"slab/weight": WHOLE[:, 1:3]})
    assert torch.equal(TensorDirectory(tmp_path).read("slab/weight", 0, 6, (6, 2)), WHOLE[:, 1:3])


def test_the_number_of_steps_comes_back_and_anything_else_is_damage(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"state\.json is damaged: .*No such file"):
        read_steps(tmp_path)
    write_steps(tmp_path, 41)
    assert read_steps(tmp_path) == 41
    for content in ("", '{"optimizer_steps":-1}', '{"optimizer_steps":1.5}', "[" * 100_000):
        (tmp_path / "state.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"state\.json is damaged"):
            read_steps(tmp_path)


def test_a_number_without_rows_is_refused(tmp_path: Path) -> None:
    write_tensors(tmp_path, "scalar", {"slab/weight": torch.tensor(1.0)})
    with pytest.raises(CheckpointError, match="has no rows 0 to 1 of slab/weight"):
        TensorDirectory(tmp_path).read("slab/weight", 0, 1, (1, 4))

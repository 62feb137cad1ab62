"""Safetensors files of a model: ranges of their tensors, and every way in which a folder is broken."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gspo.model_files import folder as module
from gspo.model_files.folder import ModelFilesError, ModelFolder

WHOLE = {"a": torch.arange(24, dtype=torch.float32).view(4, 6), "b": torch.linspace(-3, 3, 10).bfloat16()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files and their index."""
    index = {}
    for number, (name, tensor) in enumerate(WHOLE.items()):
        save_file({name: tensor}, tmp_path / f"model-{number}.safetensors")
        index[name] = f"model-{number}.safetensors"
    write_index(tmp_path, index)
    return tmp_path


def write_index(directory: Path, weight_map: object) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "start", "length"), [("a", 0, 24), ("a", 5, 14), ("b", 3, 7), ("b", 9, 0)])
def test_any_range_of_a_tensor_is_read_in_the_type_of_its_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, start: int, length: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(module, "STAGING_BYTES", 12)  # several pieces
    target = torch.full((length,), -1.0, dtype=dtype)
    with ModelFolder(folder) as files:
        files.read(files.tensors[name], start, target)
    assert torch.equal(target, WHOLE[name].reshape(-1)[start : start + length].to(dtype))


def test_one_file_comes_before_an_index_that_it_replaced(folder: Path) -> None:
    save_file({"c": torch.ones(2)}, folder / "model.safetensors")
    with ModelFolder(folder) as files:
        assert list(files.tensors) == ["c"]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def with_header(path: Path, header: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (lambda at: (at / "model.safetensors.index.json").unlink(), "neither model.safetensors nor"),
    "a file is missing": (
        lambda at: (at / "model-1.safetensors").unlink(),
        r"places b in model-1.safetensors, which is not",
    ),
    "a file is cut": (
        lambda at: cut(at / "model-0.safetensors"),
        r"model-0.safetensors has \d+ bytes, its header describes",
    ),
    "a file is empty": (lambda at: (at / "model-0.safetensors").write_bytes(b""), "model-0.safetensors is not a whole"),
    "a header ends early": (
        lambda at: with_header(at / "model-0.safetensors", b'{"a": '),
        "model-0.safetensors is not a whole",
    ),
    "a header is too long": (
        lambda at: (at / "model-0.safetensors").write_bytes(struct.pack("<Q", 2**60) + b"{}"),
        "its header would have 1152921504606846976 bytes",
    ),
    "a header is a list": (lambda at: with_header(at / "model-0.safetensors", b"[1]"), "model-0.safetensors is not a whole"),
    "a tensor is larger than its bytes": (
        lambda at: with_header(at / "model-0.safetensors", b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 8]}}'),
        r"a is F32 \[9\] and has 8 bytes",
    ),
    "a tensor begins before the file": (
        lambda at: with_header(
            at / "model-0.safetensors", b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}'
        ),
        r"a has shape \[2\] at -8 to 0",
    ),
    "the index is no object": (
        lambda at: (at / "model.safetensors.index.json").write_text("[]"),
        "index.json cannot be read",
    ),
    "the index is empty": (lambda at: write_index(at, {}), "weight_map is empty"),
    "the index names no file": (lambda at: write_index(at, {"a": 7}), "places a in '7', which is no safetensors file"),
    "the index leaves the folder": (
        lambda at: write_index(at, {"a": "../model-0.safetensors"}),
        "places a in '../model-0.safetensors', which is no safetensors file",
    ),
    "the index is of other files": (
        lambda at: write_index(at, {"c": "model-0.safetensors"}),
        "places c in model-0.safetensors, which has none",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_folder_is_named_with_the_way_out(folder: Path, what: str) -> None:
    breaks, expected = BROKEN[what]
    breaks(folder)
    with pytest.raises(ModelFilesError, match=expected) as found:
        ModelFolder(folder)
    assert "copy or download the model again" in str(found.value)


def test_a_file_that_becomes_shorter_while_it_is_read_is_named(folder: Path) -> None:
    with ModelFolder(folder) as files:
        cut(folder / "model-0.safetensors")
        with pytest.raises(ModelFilesError, match="ends inside a: the file was truncated"):
            files.read(files.tensors["a"], 0, torch.empty(24))

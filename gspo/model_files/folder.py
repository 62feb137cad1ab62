"""The tensors of a model's folder: where each lies in which safetensors file, and any range of its elements.

A file is eight bytes that give the length of a header, the header (JSON), and the tensors' bytes. Ranges are read straight
into the memory that they are for: a mapped file would count as this process's memory, page by page.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch import Tensor

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
MOST_HEADER_BYTES: Final = 100_000_000
"""As in the safetensors library."""
STAGING_BYTES: Final = 16 * 2**20
"""Read at once where the type changes, or the target is on a device."""
DTYPES: Final = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types that weights can be read from; each is cast to the model's type."""
_AGAIN: Final = "copy or download the model again"


class ModelFilesError(ValueError):
    """A model's folder from which its weights cannot be read. The text names the file, the tensor and what to do."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of a file."""

    name: str
    path: Path
    dtype: str
    """As safetensors names it."""
    shape: tuple[int, ...]
    begin: int
    """Of its bytes, in the file."""
    num_bytes: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class ModelFolder:
    """The folder's tensors by name, and its open files; a context manager."""

    def __init__(self, directory: Path) -> None:
        """Raises: ModelFilesError for a folder without weights, an index without its files, and a damaged header."""
        self.directory = directory
        self.tensors: dict[str, StoredTensor] = {}
        self._open: dict[Path, int] = {}
        for path, listed in _files(directory).items():
            found = _read_header(path)
            absent = sorted(name for name in listed if name not in found)
            if absent:
                raise ModelFilesError(f"{directory / INDEX} places {absent[0]} in {path.name}, which has none; {_AGAIN}")
            self.tensors |= {name: found[name] for name in listed} if listed else found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def read(self, stored: StoredTensor, start: int, target: Tensor) -> None:
        """Set ``target``, one contiguous dimension, to the elements of ``stored`` from ``start`` on, cast to its type.

        Raises: ModelFilesError when the file cannot be read, or has become shorter.
        """
        dtype = DTYPES[stored.dtype]
        at = stored.begin + start * dtype.itemsize
        if target.dtype == dtype and target.device.type == "cpu":
            self._read_bytes(stored, at, target)
            return
        room = STAGING_BYTES // dtype.itemsize
        staging = torch.empty(min(room, target.numel()), dtype=dtype)
        for offset in range(0, target.numel(), room):
            piece = staging[: min(room, target.numel() - offset)]
            self._read_bytes(stored, at + offset * dtype.itemsize, piece)
            target[offset : offset + piece.numel()].copy_(piece)

    def _read_bytes(self, stored: StoredTensor, at: int, target: Tensor) -> None:
        data = target.detach().view(torch.uint8).numpy().data
        done = 0
        try:
            descriptor = self._descriptor(stored.path)
            while done < len(data):
                count = os.preadv(descriptor, [data[done:]], at + done)
                if count == 0:
                    raise ModelFilesError(f"{stored.path} ends inside {stored.name}: the file was truncated; {_AGAIN}")
                done += count
        except OSError as error:
            raise ModelFilesError(f"{stored.path} cannot be read: {error}; {_AGAIN}") from error

    def _descriptor(self, path: Path) -> int:
        if path not in self._open:
            self._open[path] = os.open(path, os.O_RDONLY)
        return self._open[path]


def _files(directory: Path) -> dict[Path, list[str]]:
    """Return the files with weights, and the tensors that are wanted of each; none named: all of it. As transformers
    chooses.
    """
    single, index = directory / SINGLE, directory / INDEX
    if single.is_file():
        return {single: []}
    if not index.is_file():
        raise ModelFilesError(f"{directory} holds neither {SINGLE} nor {INDEX}; {_AGAIN}, or save it with save_pretrained")
    files: dict[Path, list[str]] = {}
    for name, file in _weight_map(index).items():
        if not isinstance(file, str) or file != os.path.basename(file) or not file.endswith(".safetensors"):
            raise ModelFilesError(f"{index} places {name} in {str(file)[:100]!r}, which is no safetensors file; {_AGAIN}")
        files.setdefault(directory / file, []).append(name)
    for path, names in files.items():
        if not path.is_file():
            raise ModelFilesError(f"{index} places {names[0]} in {path.name}, which is not there; {_AGAIN}")
    return files


def _weight_map(index: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(index.read_bytes())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelFilesError(f"{index} cannot be read: {type(error).__name__}: {error}; {_AGAIN}") from error
    if not isinstance(found, dict) or not found:
        raise ModelFilesError(f"{index}: weight_map is empty; {_AGAIN}")
    return found


def _read_header(path: Path) -> dict[str, StoredTensor]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size - 8, MOST_HEADER_BYTES):
                raise ValueError(f"its header would have {length} bytes, the file has {size}")
            header = json.loads(file.read(length))
        found = [_stored(path, name, entry, 8 + length) for name, entry in header.items() if name != "__metadata__"]
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelFilesError(f"{path} is not a whole safetensors file: {error}; {_AGAIN}") from error
    end = max((each.begin + each.num_bytes for each in found), default=8 + length)
    if end != size:
        raise ModelFilesError(f"{path} has {size} bytes, its header describes {end}: it is truncated or damaged; {_AGAIN}")
    return {each.name: each for each in found}


def _stored(path: Path, name: str, entry: Any, data: int) -> StoredTensor:
    begin, end = entry["data_offsets"]
    dtype, shape = entry["dtype"], entry["shape"]
    if not all(isinstance(each, int) and 0 <= each < 2**62 for each in (begin, end, *shape)) or begin > end:
        raise ValueError(f"{name} has shape {str(shape)[:100]} at {begin} to {end}")
    stored = StoredTensor(
        name=name, path=path, dtype=str(dtype), shape=tuple(shape), begin=data + begin, num_bytes=end - begin
    )
    known = DTYPES.get(stored.dtype)
    if known is not None and stored.num_elements * known.itemsize != end - begin:
        raise ValueError(f"{name} is {dtype} {list(shape)} and has {end - begin} bytes")
    return stored

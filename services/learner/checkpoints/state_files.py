"""A learner's state in files: tensors in safetensors, and a number. Any slice of rows can be read without the rest.

A tensor lies in one file, or in several that hold consecutive rows of it (each the experts of one rank).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gspo_protocol.messages import Count
from gspo_services.learner.checkpoints.format import CheckpointError

_SUFFIX: Final = ".safetensors"
_FIRST_ROW: Final = "first_row"
_STEPS: Final = "state.json"


class _Steps(msgspec.Struct):
    optimizer_steps: Count


def write_steps(directory: Path, num_steps: int) -> Path:
    """Write the number of optimizer steps made so far. Raises: OSError."""
    path = directory / _STEPS
    path.write_bytes(msgspec.json.encode(_Steps(num_steps)))
    return path


def read_steps(directory: Path) -> int:
    """Read what ``write_steps`` wrote. Raises: CheckpointError."""
    path = directory / _STEPS
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Steps).optimizer_steps
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}; resume from another checkpoint") from error


@dataclass(frozen=True, kw_only=True)
class TensorFile:
    """The arguments of ``write_tensors``, with tensors on the CPU."""

    stem: str
    tensors: Mapping[str, Tensor]
    first_row: int = 0

    def write(self, directory: Path) -> Path:
        """Write the file into ``directory``. Raises: OSError."""
        return write_tensors(directory, self.stem, self.tensors, first_row=self.first_row)


def write_tensors(directory: Path, stem: str, tensors: Mapping[str, Tensor], *, first_row: int = 0) -> Path:
    """Write ``tensors``: each holds the rows of its key from ``first_row`` on. Raises: OSError."""
    content = {key: tensor.detach().to("cpu").contiguous() for key, tensor in tensors.items()}
    path = directory / f"{stem}{_SUFFIX}"
    try:
        save_file(content, path, metadata={_FIRST_ROW: str(first_row)})
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error
    return path


@dataclass(frozen=True)
class _Part:
    path: Path
    first_row: int
    num_rows: int
    file: Any
    """The open file, if it is kept open."""


class TensorDirectory:
    """Reads what any number of processes wrote into a directory with ``write_tensors``."""

    def __init__(self, directory: Path, *, hold: ExitStack | None = None) -> None:
        """``hold`` keeps every file open until it ends: they can then be read even if they are removed meanwhile.

        Raises: CheckpointError when a file cannot be read as safetensors.
        """
        self._directory = directory
        self._parts: dict[str, list[_Part]] = {}
        for path in sorted(directory.glob(f"*{_SUFFIX}")):
            held = None if hold is None else hold.enter_context(_reading(path))
            with _reading(path) if held is None else nullcontext(held) as file:
                first_row = _first_row(path, file.metadata())
                for key in file.keys():  # noqa: SIM118 - not a mapping
                    shape = file.get_slice(key).get_shape()
                    part = _Part(path, first_row, shape[0] if shape else 0, held)
                    self._parts.setdefault(key, []).append(part)
        for parts in self._parts.values():
            parts.sort(key=lambda part: part.first_row)

    def read(self, key: str, first_row: int, num_rows: int, shape: tuple[int, ...]) -> Tensor:
        """Rows ``first_row`` to ``first_row + num_rows`` of ``key``, float32 ``shape``.

        Raises: CheckpointError when they are missing, or have another shape or type.
        """
        end = first_row + num_rows
        found: list[Tensor] = []
        at = first_row
        for part in self._parts.get(key, []):
            if part.first_row <= at < min(end, part.first_row + part.num_rows):
                until = min(end, part.first_row + part.num_rows)
                with _reading(part.path) if part.file is None else nullcontext(part.file) as file:
                    found.append(file.get_slice(key)[at - part.first_row : until - part.first_row])
                at = until
        if at != end:
            raise CheckpointError(f"{self._directory} has no rows {at} to {end} of {key}; resume from another checkpoint")
        whole = found[0] if len(found) == 1 else torch.cat(found)
        if tuple(whole.shape) != shape or whole.dtype != torch.float32:
            raise CheckpointError(
                f"{self._directory}: {key} is {whole.dtype} {list(whole.shape)}, this learner has float32 {list(shape)}; "
                "resume with the model that was saved"
            )
        return whole


class _reading:
    """``safe_open``, with a CheckpointError that names the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Any:
        try:
            self._file = safe_open(self._path, framework="pt")
            return self._file.__enter__()
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self._path} is damaged: {error}; resume from another checkpoint") from error

    def __exit__(self, *exception: Any) -> None:
        self._file.__exit__(*exception)


def _first_row(path: Path, metadata: Mapping[str, str] | None) -> int:
    text = (metadata or {}).get(_FIRST_ROW, "")
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise CheckpointError(f"{path} says first_row = {text[:50]!r}; resume from another checkpoint")
    return int(text)

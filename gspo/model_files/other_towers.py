"""What a checkpoint has beside its text model: towers for images, layers that predict further tokens. Nobody trains it, and
an export copies it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from gspo.model_files.folder import ModelFolder, StoredTensor
from gspo.model_files.text_model import text_model_of


def other_tensors(model_dir: Path) -> list[StoredTensor]:
    """Return the tensors of a folder that are not of its text model, by files; none where that is the whole.

    Raises: ModelFilesError, and other ValueErrors of a configuration that cannot be read.
    """
    text = text_model_of(json.loads((model_dir / "config.json").read_bytes()))
    if not text.names:
        return []
    found = ModelFolder(model_dir).tensors.values()
    return sorted((each for each in found if not text.owns(each.name)), key=lambda each: (each.path, each.begin))


def read_others(model_dir: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield them with their values, in the files' types. Raises: as ``other_tensors``; OSError, SafetensorError."""
    for path, tensors in groupby(other_tensors(model_dir), key=lambda each: each.path):
        with safe_open(path, framework="pt") as file:
            for each in tensors:
                yield each.name, file.get_tensor(each.name)

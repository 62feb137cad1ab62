"""Exports the policy as an ordinary Hugging Face checkpoint: safetensors, configuration, tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from gspo.files import make_partial_directory, partial_path, publish_directory
from gspo.model_files.folder import ModelFilesError
from gspo.model_files.other_towers import read_others
from gspo_services.shared.runtime.errors import ServiceError
from gspo_services.shared.runtime.foreign import belongs_to_model

if TYPE_CHECKING:
    from gspo_services.learner.engine import LearnerEngine

# Files of a model directory with weights, or that this module writes itself. The others belong to tokenizer and prompt.
_CONFIG = "config.json"
_NOT_COPIED = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", _CONFIG)
# Where a model has its other chat templates.
_TEMPLATES = "additional_chat_templates"


class ExportError(ServiceError):
    """An export could not be written; the text says why and what to do."""


def export_model(
    engine: LearnerEngine,
    destination: Path,
    *,
    tokenizer_from: Path,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 2 << 30,
) -> Path:
    """Write a directory that ``from_pretrained`` loads, whole or not at all. Replaces an older export. Collective.

    Args:
        tokenizer_from: the starting model's directory, from which all is copied that is not trained.
        dtype: the type of the weights; None keeps the learner's.
        max_shard_bytes: rank 0 holds at most one shard of this size, or one larger tensor, in memory.

    Raises: ValueError, before anything is written, when tokenizer_from is no model's directory; ExportError, on all ranks,
    when the export cannot be written: nothing of it stays, but an older export does.
    """
    if not (tokenizer_from / _CONFIG).is_file():
        raise ValueError(f"tokenizer_from is {tokenizer_from}, without {_CONFIG}; name the starting model's directory")
    weights = engine.serving_weights(dtype)
    failure: Exception | None = None
    try:
        if engine.rank == 0:
            _write(engine, weights, destination, tokenizer_from, dtype, max_shard_bytes)
    except (OSError, SafetensorError, ModelFilesError) as error:
        failure = error
    # The ranks gather each tensor together, even those that are not written.
    for _ in weights:
        assert engine.rank == 0, "only rank 0 is given weights"
    if bool(engine.sum_over_ranks(torch.tensor([float(failure is not None)])).item()):
        shutil.rmtree(partial_path(destination), ignore_errors=True)
        raise ExportError(_unwritten(destination, failure)) from failure
    return destination


def _unwritten(destination: Path, failure: Exception | None) -> str:
    if failure is None:
        return f"{destination} was not written: rank 0 could not; its log has the reason"
    free = shutil.disk_usage(destination.parent).free if destination.parent.is_dir() else 0
    return (
        f"{destination} cannot be written: {failure}; {free / 2**20:.0f} MiB are free: make room and make it writable, "
        "then start the learner again: it resumes from its last checkpoint, which is intact, and exports again"
    )


def _write(
    engine: LearnerEngine,
    weights: Iterator[tuple[str, Tensor]],
    destination: Path,
    tokenizer_from: Path,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
) -> None:
    """Raises: OSError, SafetensorError, ModelFilesError."""
    partial = make_partial_directory(destination)
    write_model(
        partial,
        weights,
        generation_config=engine.model.generation_config,
        dtype=dtype or engine.model.dtype,
        tokenizer_from=tokenizer_from,
        max_shard_bytes=max_shard_bytes,
    )
    publish_directory(partial, destination)


def write_model(
    directory: Path,
    weights: Iterable[tuple[str, Tensor]],
    *,
    generation_config: Any,
    dtype: torch.dtype,
    tokenizer_from: Path,
    max_shard_bytes: int = 2 << 30,
) -> None:
    """Write a model in Hugging Face format into ``directory``, which is there. Files that are there already stay.

    Args:
        weights: names and tensors as inference engines load them; a tensor is used only until the next one is asked for.
        generation_config: transformers' own object, or None.
        dtype: the type of the weights, for config.json.
        tokenizer_from: the starting model's directory. All else comes from there: towers that are not trained, bit for bit,
            and config.json, as transformers would drop keys that SGLang reads.

    Raises: OSError, SafetensorError, ModelFilesError.
    """
    writer = ShardWriter(directory, max_shard_bytes)
    for name, tensor in chain(weights, read_others(tokenizer_from)):
        writer.add(name, tensor)
    writer.finish()
    _write_config(tokenizer_from / _CONFIG, directory / _CONFIG, str(dtype).removeprefix("torch."))
    if generation_config is not None:
        generation_config.save_pretrained(directory)
    copy_companions(tokenizer_from, directory)


def _write_config(source: Path, destination: Path, dtype: str) -> None:
    """Copy config.json; another type of weights is noted where it notes them."""
    config = json.loads(source.read_bytes())
    inner = [each for each in [config.get("text_config")] if isinstance(each, dict)]
    for part in (config, *inner):
        key = "torch_dtype" if "torch_dtype" in part else "dtype"
        if part is config or key in part:
            part[key] = dtype
    destination.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class ShardWriter:
    """Collects tensors up to a size, writes them, and at the end gives the files their conventional names."""

    def __init__(self, directory: Path, max_shard_bytes: int) -> None:
        self._directory = directory
        self._max_shard_bytes = max_shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._total_bytes = 0
        self._shards: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a copy of a tensor. Raises: OSError, SafetensorError."""
        num_bytes = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + num_bytes > self._max_shard_bytes:
            self._write()
        # A copy: the tensor is valid only until the next one is asked for.
        self._pending[name] = tensor.to("cpu", copy=True)
        self._pending_bytes += num_bytes
        self._total_bytes += num_bytes

    def finish(self) -> None:
        """Write what is left, and the index. Raises: OSError, SafetensorError."""
        self._write()
        if len(self._shards) == 1:
            self._temporary(0).rename(self._directory / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for index, names in enumerate(self._shards):
            file = f"model-{index + 1:05d}-of-{len(self._shards):05d}.safetensors"
            self._temporary(index).rename(self._directory / file)
            weight_map |= dict.fromkeys(names, file)
        content = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        (self._directory / "model.safetensors.index.json").write_text(json.dumps(content, indent=2), encoding="utf-8")

    def _write(self) -> None:
        save_file(self._pending, self._temporary(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending = {}
        self._pending_bytes = 0

    def _temporary(self, index: int) -> Path:
        return self._directory / f"shard-{index}.tmp"


def copy_companions(source: Path, destination: Path) -> None:
    """Copy what a model's directory has beside weights and configuration. Raises: OSError."""
    skipped = {path for pattern in _NOT_COPIED for path in source.glob(pattern)}
    for path in [*source.iterdir(), *(source / _TEMPLATES).glob("*")]:
        copy = destination / path.relative_to(source)
        if not path.is_file() or path in skipped or copy.exists():
            continue
        if not belongs_to_model(path, source):
            raise OSError(f"{path} is a link out of the model's folder, and would be published: copy the file there")
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)

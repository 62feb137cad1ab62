"""Writes an export: whole or not at all, and never over existing files."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from gspo.files import make_partial_directory, publish_directory
from gspo.model_files.file_names import is_tower
from gspo.model_files.folder import ModelFilesError
from gspo.model_files.other_towers import other_tensors
from gspo_services.learner.export import write_model
from gspo_services.learner.weights import DTYPES
from gspo_services.runs.export.adapted import PEFT_PREFIX, AdaptedCheckpointWeights
from gspo_services.runs.export.weights import CheckpointWeights
from gspo_services.shared.runtime.errors import ConfigurationError, NoRoomError, ServiceError, is_for_want_of_room
from gspo_services.shared.runtime.operations import only_operation

CARD = "README.md"
_SPARE_BYTES = 16 << 20
"""Tokenizer, configuration and card."""


def require_free(destination: Path) -> None:
    """Raises: ConfigurationError when something exists there."""
    if destination.is_symlink() or (destination.exists() and not _is_empty_directory(destination)):
        raise ConfigurationError(f"{destination} already exists: name another directory with --to, or remove it")


def write_export(
    weights: CheckpointWeights, destination: Path, *, dtype: str, model_dir: Path, card: str, published: str | None = None
) -> None:
    """Write the model to ``destination``, a directory that does not exist or is empty.

    Args:
        dtype: the type of the weights, a key of DTYPES.
        model_dir: the model that the run started from: all that is not trained is copied.
        card: the content of README.md.
        published: the digest under which these weights were served, to compare with; None: it is unknown.

    Raises: ConfigurationError; CheckpointError when the weights are not those that were saved; NoRoomError, ServiceError
    when it cannot be written. Then nothing of it remains.
    """
    kind = DTYPES[dtype]
    others = sum(each.num_bytes for each in other_tensors(model_dir))
    with _export(destination, weights.num_parameters * kind.itemsize + others, card) as partial:
        write_model(
            partial,
            weights.serving_weights(kind),
            generation_config=weights.model.generation_config,
            dtype=kind,
            tokenizer_from=model_dir,
        )
        if published is not None and weights.version_digest() != published:
            raise ServiceError(
                f"{weights.path}: these are not the weights that the ledger knows for this version: is it from another run, "
                "or has model.dtype or the starting model changed since? Nothing was exported"
            )


def write_adapter(weights: AdaptedCheckpointWeights, destination: Path, *, card: str) -> None:
    """Write the adapters alone to ``destination``, a directory that does not exist or is empty, in peft's format; each of
    several in a folder of its name.

    Raises: as ``write_export``.
    """
    if is_tower(weights.model):
        raise ConfigurationError(
            f"--adapter: {type(weights.model).__name__} is the text model of a checkpoint that takes images, where peft "
            "would find its layers under other names: leave it out to export the checkpoint with the adapters merged"
        )
    whole = weights.adapter_tensors()
    with _export(destination, sum(tensor.nbytes for tensor in whole.values()), card) as partial:
        for name in weights.names or [""]:
            folder = partial / name
            folder.mkdir(exist_ok=True)
            own = weights.own_part(whole, name)
            matrices = {PEFT_PREFIX + key: tensor for key, tensor in own.items()}
            save_file(matrices, folder / "adapter_model.safetensors", metadata={"format": "pt"})
            weights.peft_config().save_pretrained(folder)


@contextmanager
def _export(destination: Path, num_bytes: int, card: str) -> Iterator[Path]:
    """Yield a directory with a card that becomes ``destination`` at the end of the block, unless it raises.

    Raises: ConfigurationError, NoRoomError, ServiceError.
    """
    require_free(destination)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        _require_room(destination, num_bytes + _SPARE_BYTES)
        with _partial(destination) as partial:
            # Before the other files: the starting model may have a README.md, which says nothing about these weights.
            (partial / CARD).write_text(card, encoding="utf-8")
            yield partial
            publish_directory(partial, destination, replace=False)
    except (OSError, SafetensorError, ModelFilesError) as error:
        problem = NoRoomError if is_for_want_of_room(error) else ServiceError
        raise problem(
            f"{destination} cannot be written: {error}: make room and make it writable, or name another directory with --to"
        ) from error


@contextmanager
def _partial(destination: Path) -> Iterator[Path]:
    """Yield an empty directory beside ``destination`` that nobody else writes to and that is removed afterwards."""
    with only_operation(destination, "export", "wait for it, or use --to"):
        require_free(destination)
        path = make_partial_directory(destination)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def _require_room(destination: Path, num_bytes: int) -> None:
    """Raises: NoRoomError."""
    free = shutil.disk_usage(destination.parent).free
    if free < num_bytes:
        raise NoRoomError(
            f"{destination} needs {num_bytes / 2**20:,.0f} MiB, but only {free / 2**20:,.0f} MiB are free there: make room, "
            "or name another directory with --to"
        )


def _is_empty_directory(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())

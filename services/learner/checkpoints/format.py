"""Checkpoints of the learner: model, optimizer, random state, policy version, position in the order of batches.

    root/version-0000000012-batch-0000000003/   one checkpoint, published by a rename
        engine/                                 weights and optimizer, by parameter (``optimizer_state``)
        random-00000.json ...                   random states, one file per rank
        checkpoint.json                         everything else, and the size of every other file
    root/latest                                 name of the newest
    root/last-version                           the last numbers of policy versions (``versions``)

A killed writer leaves ``.partial-*``, which nothing reads and the next writer removes. Ranks on several hosts need a shared
file system.

Any number of ranks, in any ZeRO stage and expert-parallel size, can resume a checkpoint. Tensors are safetensors files and
everything else is JSON: no pickle.
"""

from __future__ import annotations

import base64
import json
import random
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from protocol.messages import Count, Version
from services.runtime.errors import ServiceError

_FORMAT = 2
METADATA = "checkpoint.json"
ENGINE = "engine"
LATEST = "latest"
PREFIX = "version-"
_NAME: Final = re.compile(r"version-\d{10,17}-batch-\d{10,17}")
_RANDOM = "random-"


class CheckpointError(ServiceError):
    """A checkpoint cannot be used; the text has the reason and the way out."""


@dataclass(frozen=True, kw_only=True)
class CheckpointState:
    """Where a run stands, apart from its weights."""

    policy_version: int
    """The version of the weights; 0 if they have none (see ``LearnerService._publish``)."""
    batch_position: int
    """Batches trained so far, which is the index of the next one."""
    mismatch: dict[str, float]
    """``MismatchTracker.state_dict()``"""
    adaptive_clip: dict[str, float] = field(default_factory=dict)
    """``AdaptiveClip.state_dict()``; empty when the run has none, and in older checkpoints."""


class _Format(msgspec.Struct):
    format: int


class _State(msgspec.Struct, forbid_unknown_fields=True):
    policy_version: Version
    batch_position: Count
    mismatch: dict[str, float]
    adaptive_clip: dict[str, float] = {}


class _Metadata(msgspec.Struct):
    """checkpoint.json"""

    format: int
    state: _State
    layout: dict[str, Any]
    weights_digest: str
    files: dict[str, Count]


class _RandomState(msgspec.Struct):
    """random-00000.json"""

    python: tuple[int, list[Count], float | None]
    numpy: tuple[Literal["MT19937"], list[Annotated[int, msgspec.Meta(ge=0, lt=2**32)]], int, int, float]
    torch: str
    cuda: str | None = None


class StateCopy(Protocol):
    """One rank's part of a checkpoint, copied at one moment into its own memory: training continues."""

    def write(self, directory: Path) -> None:
        """Write into ``directory``, make it, and flush to disk. Any thread may call it. Raises: OSError, RuntimeError."""

    def weights_digest(self) -> str:
        """The engine's ``weights_digest`` at that moment; empty on all ranks but the first. Any thread may call it."""


class CheckpointEngine(Protocol):
    """The methods of an engine that a checkpoint needs."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def layout(self) -> dict[str, Any]: ...
    def weights_digest(self) -> str: ...
    def save_state(self, directory: Path) -> None: ...
    def copy_state(self) -> StateCopy: ...
    def load_state(self, directory: Path) -> None: ...
    def sum_over_ranks(self, tensor: Tensor) -> Tensor: ...
    def barrier(self) -> None: ...


def unwritten_error(path: Path, error: Exception) -> CheckpointError:
    """The error when ``path`` cannot be written, with the way out."""
    free = shutil.disk_usage(path.parent).free if path.parent.is_dir() else 0
    return CheckpointError(
        f"{path} cannot be written: {error}; {free / 2**20:.0f} MiB are free there: make room and make it writable, then "
        "start again. Checkpoints before it are intact"
    )


def find_latest(root: Path) -> Path | None:
    """The newest complete checkpoint; None when there is none yet.

    Raises: CheckpointError when ``latest`` names one that is gone.
    """
    pointer = root / LATEST
    if not pointer.is_file():
        # A writer may have been killed between its first checkpoint's rename and the pointer.
        complete = complete_checkpoints(root)
        return complete[-1] if complete else None
    name = pointer.read_text(encoding="utf-8", errors="replace").strip()
    if not name.startswith(PREFIX) or "/" in name or "\0" in name or len(name) > 100:
        raise CheckpointError(f"{pointer} holds {name[:100]!r}, not the name of a checkpoint; write one of those beside it")
    path = root / name
    if not (path / METADATA).is_file():
        found = ", ".join(other.name for other in complete_checkpoints(root)) or "none"
        raise CheckpointError(f"{pointer} names {path.name}, which is not there; complete checkpoints: {found}")
    return path


def load_checkpoint(engine: CheckpointEngine, path: Path) -> CheckpointState:
    """Load ``path``, with its random states, into an engine that has not trained yet. Collective.

    Raises: CheckpointError, on all ranks alike and before anything is loaded, when the checkpoint is truncated or of
    another model, type or optimizer; after loading, when the weights are not those that were saved.
    """
    metadata = read_metadata(path)
    _require_same_layout(path, metadata["layout"], engine.layout())
    # If there are more ranks than before, they take the states in turn.
    num_saved = sum(1 for name in metadata["files"] if name.startswith(_RANDOM))
    own_random_state = _read_random_state(path / random_name(engine.rank % max(1, num_saved)))
    engine.load_state(path / ENGINE)
    digest = engine.weights_digest()
    if digest != metadata["weights_digest"]:
        raise CheckpointError(
            f"{path}: the weights after loading have digest {digest}, saved were {metadata['weights_digest']}; "
            "resume from another checkpoint"
        )
    _restore_random_state(path, own_random_state)
    return CheckpointState(**metadata["state"])


def read_metadata(path: Path) -> dict[str, Any]:
    """The metadata of a complete checkpoint.

    Raises: CheckpointError when the directory is no checkpoint, has another format, or lacks bytes of any file.
    """
    file = path / METADATA
    if not file.is_file():
        raise CheckpointError(f"{path} is not a checkpoint: it has no {METADATA}")
    try:
        content = file.read_bytes()
        found_format = msgspec.json.decode(content, type=_Format).format
        if found_format != _FORMAT:
            raise CheckpointError(f"{path} has format {found_format}; this learner reads {_FORMAT}")
        metadata: dict[str, Any] = msgspec.to_builtins(msgspec.json.decode(content, type=_Metadata))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: {error}; resume from another checkpoint") from error
    for name, size in metadata["files"].items():
        try:
            found = (path / name).stat().st_size if (path / name).is_file() else 0
        except OSError as error:  # a name that no file can have
            raise CheckpointError(f"{file} is damaged: {error}; resume from another checkpoint") from error
        if found != size:
            raise CheckpointError(f"{path / name} has {found} bytes, {size} were written; resume from another checkpoint")
    return metadata


def write_metadata(partial: Path, state: CheckpointState, layout: dict[str, Any], digest: str) -> None:
    """Write the last file, which makes the directory a checkpoint. Raises: OSError."""
    files = {str(file.relative_to(partial)): file.stat().st_size for file in sorted(partial.rglob("*")) if file.is_file()}
    metadata = {
        "format": _FORMAT,
        "state": vars(state),
        "layout": layout,
        "weights_digest": digest,
        "files": files,
    }
    (partial / METADATA).write_text(json.dumps(metadata, indent=1), encoding="utf-8")


def _require_same_layout(path: Path, saved: dict[str, Any], present: dict[str, Any]) -> None:
    for key, value in present.items():
        if saved.get(key) != value:
            raise CheckpointError(f"{path} was saved with {key} = {saved.get(key)}, this learner has {value}; use the same")


def complete_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints, those of fewer batches first."""
    found = [path for path in root.glob(f"{PREFIX}*") if _NAME.fullmatch(path.name) and (path / METADATA).is_file()]
    # By batches: what is trained again has no version of its own.
    return sorted(found, key=lambda path: (path.name.partition("-batch-")[2], path.name))


def random_name(rank: int) -> str:
    """The file name of a rank's random states."""
    return f"{_RANDOM}{rank:05d}.json"


def random_state() -> dict[str, Any]:
    """This process's random states, as plain JSON values."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(internal), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": _encode(torch.get_rng_state()),
        "cuda": _encode(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
    }


def _read_random_state(path: Path) -> _RandomState:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_RandomState)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}; resume from another checkpoint") from error


def _restore_random_state(path: Path, state: _RandomState) -> None:
    version, internal, gauss = state.python
    kind, keys, position, has_gauss, cached = state.numpy
    try:
        random.setstate((version, tuple(internal), gauss))
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
        torch.set_rng_state(_decode(state.torch))
        if state.cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(_decode(state.cuda))
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise CheckpointError(f"{path}: a random state cannot be set: {error}; resume from another checkpoint") from error


def _encode(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _decode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)

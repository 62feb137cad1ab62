"""Checkpoints of the learner: model, optimizer, random state, policy version, position in the order of batches.

    root/version-0000000012-batch-0000000003/   one checkpoint, published by a rename
        engine/                                 weights and optimizer, by parameter (``optimizer_state``)
        random-00000.json ...                   random states, one file per rank
        checkpoint.json                         everything else, and size and digest of every other file and of itself
    root/damaged-version-...                    one found damaged: evidence, which nothing reads
    root/latest                                 name of the newest
    root/last-version                           the last numbers of policy versions (``versions``)

A killed writer leaves ``.partial-*``, which nothing reads and the next writer removes. Ranks on several hosts need a shared
file system.

Any number of ranks, in any ZeRO stage and expert-parallel size, can resume a checkpoint. Tensors are safetensors files and
everything else is JSON: no pickle.
"""

from __future__ import annotations

import base64
import errno
import json
import random
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from gspo_protocol.messages import Count, Version
from gspo_services.learner.checkpoints.digests import FileDigest, find_damage, take_digests, text_digest
from gspo_services.learner.checkpoints.layout import layout_problem
from gspo_services.shared.runtime.errors import ServiceError
from gspo_services.shared.runtime.foreign import ForeignTree

_FORMAT: Final = 1
METADATA = "checkpoint.json"
ENGINE = "engine"
LATEST = "latest"
PREFIX = "version-"
_NAME: Final = re.compile(r"version-\d{10,17}-batch-\d{10,17}")
_RANDOM = "random-"


class CheckpointError(ServiceError):
    """A checkpoint cannot be used; the text says why and what to do."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint differs from what was written; the text says where."""


@dataclass(frozen=True, kw_only=True)
class CheckpointState:
    """The position of a run, apart from its weights."""

    policy_version: int
    """The version of the weights; 0 if they have none (see ``LearnerService._publish``)."""
    batch_position: int
    """Batches trained so far, which is the index of the next one."""
    mismatch: dict[str, float]
    """``MismatchTracker.state_dict()``"""
    adaptive_clip: dict[str, float] = field(default_factory=dict)
    """``AdaptiveClip.state_dict()``; empty when the run has none."""
    calibration: dict[str, Any] = field(default_factory=dict)
    """``LagCalibration.state_dict()``; empty: it starts over."""


class _State(msgspec.Struct, forbid_unknown_fields=True):
    policy_version: Version
    batch_position: Count
    mismatch: dict[str, float]
    adaptive_clip: dict[str, float]
    calibration: dict[str, Any]


class _Metadata(msgspec.Struct):
    """checkpoint.json"""

    format: int
    state: _State
    layout: dict[str, Any]
    weights_digest: str
    files: dict[str, FileDigest]
    digest: str
    """Digest of all the rest of this file."""


class _RandomState(msgspec.Struct):
    """random-00000.json"""

    python: tuple[int, list[Count], float | None]
    numpy: tuple[Literal["MT19937"], list[Annotated[int, msgspec.Meta(ge=0, lt=2**32)]], int, int, float]
    torch: str
    cuda: str | None = None


class StateCopy(Protocol):
    """One rank's part of a checkpoint, copied at one moment into its own memory: training continues."""

    def write(self, directory: Path) -> Sequence[Path]:
        """Write into ``directory``, make it, and flush to disk. Any thread may call it. Returns the files.

        Raises: OSError, RuntimeError.
        """

    def weights_digest(self) -> str:
        """Return the engine's ``weights_digest`` at that moment; empty on all ranks but the first. Thread-safe."""


class CheckpointEngine(Protocol):
    """The methods of an engine that a checkpoint needs."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def layout(self) -> dict[str, Any]: ...
    def weights_digest(self) -> str: ...
    def save_state(self, directory: Path) -> Sequence[Path]: ...
    def copy_state(self, directory: Path) -> StateCopy:
        """Copy the state. Parts without room for a copy may be written into ``directory`` at once. Collective."""

    def load_state(self, directory: Path) -> None: ...
    def sum_over_ranks(self, tensor: Tensor) -> Tensor: ...
    def broadcast(self, tensor: Tensor, *, source: int = 0) -> Tensor: ...
    def barrier(self) -> None: ...


def unwritten_error(path: Path, error: Exception) -> CheckpointError:
    """Return the error for a ``path`` that cannot be written, with what to do."""
    free = shutil.disk_usage(path.parent).free if path.parent.is_dir() else 0
    return CheckpointError(
        f"{path} cannot be written: {error}; {free / 2**20:.0f} MiB are free there: make room and make it writable, then "
        "start again. Earlier checkpoints are intact"
    )


def checkpoints_newest_first(root: Path) -> list[Path]:
    """Return the checkpoint that ``latest`` names, then the others, most batches first. Any may be damaged."""
    found = _directories(root)[::-1]
    name = _pointer(root)
    return sorted(found, key=lambda path: path.name != name)


def pointer_problem(root: Path) -> str:
    """Say what is wrong with ``latest``; empty if nothing is, or a writer may have been killed before its first write."""
    name = _pointer(root)
    if name is None or any(path.name == name for path in _directories(root)):
        return ""
    return f"{root / LATEST} names {name[:100]!r}, which does not exist"


def _pointer(root: Path) -> str | None:
    try:
        return (root / LATEST).read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{root / LATEST} cannot be read: {error}") from error


def checkpoint_of(policy_version: int, batch_position: int) -> str:
    """Return the name of a checkpoint."""
    return f"{PREFIX}{policy_version:010d}-batch-{batch_position:010d}"


def load_checkpoint(engine: CheckpointEngine, path: Path) -> CheckpointState:
    """Load ``path``, with its random states, into an engine that has not trained yet. Collective.

    Raises: DamagedCheckpoint, on all ranks alike and before anything is loaded, when a single bit of it has changed.
    CheckpointError when it has another model, type, optimizer or format; after loading, when the weights
    differ from those saved.
    """
    metadata = _verified(engine, path)
    if problem := layout_problem(metadata["layout"], engine.layout()):
        raise CheckpointError(f"{path} {problem}")
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


def _verified(engine: CheckpointEngine, path: Path) -> dict[str, Any]:
    """Return the metadata after all ranks together have verified every file's digest. Collective.

    Raises: CheckpointError, DamagedCheckpoint: on all ranks the same.
    """
    metadata: dict[str, Any] = {}
    problem: CheckpointError | None = None
    try:
        metadata = read_metadata(path)
        files = {name: FileDigest(**each) for name, each in metadata["files"].items()}
        damage = find_damage(path, files, engine.rank, engine.world_size)
        problem = DamagedCheckpoint(damage) if damage else None
    except CheckpointError as error:
        problem = error
    except OSError as error:
        problem = CheckpointError(f"{path} cannot be read: {error}")
    _agree(engine, problem)
    return metadata


def _agree(engine: CheckpointEngine, problem: CheckpointError | None) -> None:
    """Raise the problem of the first rank that has one, on every rank. Collective."""
    if engine.world_size == 1:
        if problem is not None:
            raise problem
        return
    text = "" if problem is None else f"{int(isinstance(problem, DamagedCheckpoint))}{problem}"
    lengths = torch.zeros(engine.world_size, dtype=torch.int64)
    lengths[engine.rank] = len(text.encode())
    lengths = engine.sum_over_ranks(lengths).cpu()
    if not bool(lengths.any()):
        return
    source = int(lengths.nonzero()[0])
    body = torch.zeros(int(lengths[source]), dtype=torch.uint8)
    if engine.rank == source:
        body = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    shared = bytes(engine.broadcast(body, source=source).cpu().tolist()).decode()
    raise (DamagedCheckpoint if shared[0] == "1" else CheckpointError)(shared[1:])


def read_metadata(path: Path) -> dict[str, Any]:
    """Read a checkpoint's metadata and compare it with its own digest; other files are not checked.

    Raises: DamagedCheckpoint when it is missing or changed; CheckpointError for another format.
    """
    file = path / METADATA
    try:
        content = json.loads(ForeignTree(path).read(METADATA))
        rest = {key: value for key, value in content.items() if key != "digest"}
        if content.get("digest") != text_digest(_canonical(rest)):
            _require_this_format(path, content, rest)
            raise ValueError("its content differs from what was written")
        metadata: dict[str, Any] = msgspec.to_builtins(msgspec.convert(content, _Metadata))
    except (OSError, ValueError, RecursionError, AttributeError, TypeError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO):
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        raise DamagedCheckpoint(f"{file} is damaged: {error}") from error
    return metadata


def _require_this_format(path: Path, content: dict[str, Any], rest: dict[str, Any]) -> None:
    """Raises: CheckpointError for another release's checkpoint, which must not be taken for a damaged one."""
    found = content.get("format")
    if found == _FORMAT or content.get("digest") == text_digest(_canonical(rest | {"format": _FORMAT})):
        return  # Perhaps only the number was changed.
    if isinstance(found, int) and 0 < found < 1000:
        raise CheckpointError(
            f"{path} has format {found}; this learner reads {_FORMAT}: continue the run with the release that began it, or "
            "export the model with that release and start from it"
        )


def write_metadata(partial: Path, state: CheckpointState, layout: dict[str, Any], digest: str) -> None:
    """Write the last file, which makes the directory a checkpoint. Raises: OSError."""
    files = {name: msgspec.to_builtins(each) for name, each in take_digests(partial).items()}
    metadata = {
        "format": _FORMAT,
        "state": vars(state),
        "layout": layout,
        "weights_digest": digest,
        "files": files,
    }
    metadata["digest"] = text_digest(_canonical(metadata))
    (partial / METADATA).write_text(json.dumps(metadata, indent=1), encoding="utf-8")


def _canonical(metadata: Mapping[str, Any]) -> str:
    return json.dumps(metadata, sort_keys=True)


def complete_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints, those of fewer batches first."""
    return [path for path in _directories(root) if (path / METADATA).is_file()]


def _directories(root: Path) -> list[Path]:
    found = [path for path in root.glob(f"{PREFIX}*") if _NAME.fullmatch(path.name) and path.is_dir()]
    # By batches: batches trained again make no version.
    return sorted(found, key=lambda path: (path.name.partition("-batch-")[2], path.name))


def random_name(rank: int) -> str:
    """Return the file name of a rank's random states."""
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

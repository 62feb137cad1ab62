"""learner-tokens/batch-N-rank-R-of-W.npz: what one rank computed for its sequences of one batch. numpy's own format, without
pickle; a file appears whole or not at all."""

import os
import re
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gspo.files import partial_path
from gspo_services.shared.runtime.foreign import ForeignTree

TOKEN_DIRECTORY: Final = "learner-tokens"
FORMAT: Final = 1
NAME: Final = re.compile(r"^batch-(\d{9})-rank-(\d{4})-of-(\d{4})\.npz$")
TOKEN_ARRAYS: Final = ("learner_T", "start_T", "ratio_T", "entropy_T", "advantage_T", "clip_T")
CLIPPED_HIGH: Final = 1
CLIPPED_LOW: Final = 2


@dataclass(frozen=True, kw_only=True)
class TokenPart:
    """One rank's sequences of a batch, one after another. S: sequences; T: their trained tokens, in order; C: columns."""

    batch: int
    policy_version: int
    """The version that the batch was assembled for."""
    trajectories_S: NDArray[np.int64]
    places_S: NDArray[np.int64]
    """Each one's place among the trained sequences of its trajectory, from 0."""
    steps_S: NDArray[np.int64]
    """The optimizer step of the batch that it was trained in, from 0."""
    counts_S: NDArray[np.int64]
    """The number of trained tokens of each."""
    columns: tuple[str, ...]
    """Names of ``stats_SC``: the fields of gspo.diagnostics.SequenceStats."""
    stats_SC: NDArray[np.float64]
    learner_T: NDArray[np.float32]
    """The learner's log-prob in the step that trained the token."""
    start_T: NDArray[np.float32]
    """The same under the weights at the start of the batch; NaN where the objective does not need it."""
    ratio_T: NDArray[np.float32]
    """The importance ratio s_t."""
    entropy_T: NDArray[np.float32]
    """Entropy in nats."""
    advantage_T: NDArray[np.float32]
    clip_T: NDArray[np.uint8]
    """CLIPPED_HIGH or CLIPPED_LOW if a bound removed the token's gradient, otherwise 0."""

    def __post_init__(self) -> None:
        if self.stats_SC.shape != (len(self.counts_S), len(self.columns)):
            raise ValueError(f"stats_SC has shape {self.stats_SC.shape} for {len(self.counts_S)} sequences")
        for name in ("trajectories_S", "places_S", "steps_S"):
            if getattr(self, name).shape != self.counts_S.shape:
                raise ValueError(f"{name} has shape {getattr(self, name).shape} for {len(self.counts_S)} sequences")
        num_tokens = int(self.counts_S.sum())
        for name in TOKEN_ARRAYS:
            if getattr(self, name).shape != (num_tokens,):
                raise ValueError(f"{name} has shape {getattr(self, name).shape} for {num_tokens} tokens")


def write_part(run_directory: Path, part: TokenPart, *, rank: int, world_size: int) -> Path:
    """Write one rank's part, in place of an older one and of those of another number of ranks. Raises: OSError."""
    directory = run_directory / TOKEN_DIRECTORY
    directory.mkdir(exist_ok=True)
    path = directory / f"batch-{part.batch:09d}-rank-{rank:04d}-of-{world_size:04d}.npz"
    arrays: dict[str, Any] = {**vars(part), "columns": np.array(part.columns, dtype=np.str_), "format": FORMAT}
    partial = partial_path(path)
    with partial.open("wb") as file:
        np.savez(file, **arrays)
    os.replace(partial, path)
    # A run may continue on another number of ranks and train a batch again. Times of files may not say which was the last.
    for other in directory.glob(f"batch-{part.batch:09d}-rank-*.npz"):
        if not other.name.endswith(f"-of-{world_size:04d}.npz"):
            other.unlink(missing_ok=True)
    return path


def recorded_batches(run_directory: Path) -> set[int]:
    """The batches of which at least one part is there."""
    matches = (NAME.match(path.name) for path in (run_directory / TOKEN_DIRECTORY).glob("batch-*.npz"))
    return {int(match[1]) for match in matches if match is not None}


def read_parts(run_directory: Path, batch: int) -> list[TokenPart]:
    """The parts of one batch, of its last training; none if it was not recorded.

    Raises: ValueError naming a file that is damaged, or ranks whose part is missing; OSError.
    """
    return [_read(path) for path in _paths(run_directory, batch)]


def clipped_shares(run_directory: Path, batch: int) -> dict[int, float]:
    """The share of its trained tokens that the loss clipped, of each trajectory of a batch; see ``read_parts``.

    The arrays of tokens stay unread. Raises: ValueError, OSError.
    """
    weights: dict[int, float] = {}
    sums: dict[int, float] = {}
    for path in _paths(run_directory, batch):
        fields = _arrays(path, ("trajectories_S", "counts_S", "columns", "stats_SC"))
        try:
            names, stats = fields["columns"].tolist(), fields["stats_SC"]
            clipped_S = stats[:, names.index("clipped_high_S")] + stats[:, names.index("clipped_low_S")]
            columns = (fields["trajectories_S"].tolist(), fields["counts_S"].tolist(), clipped_S.tolist())
            rows = list(zip(*columns, strict=True))
        except (ValueError, TypeError, IndexError) as error:
            raise ValueError(f"{path}: not what a learner recorded: {error}") from error
        for trajectory, count, clipped in rows:
            weights[trajectory] = weights.get(trajectory, 0.0) + count
            sums[trajectory] = sums.get(trajectory, 0.0) + count * clipped
    return {trajectory: sums[trajectory] / weight for trajectory, weight in weights.items() if weight}


def _paths(run_directory: Path, batch: int) -> list[Path]:
    """The files of the last training of a batch, by rank. Raises: ValueError for ranks whose part is missing; OSError."""
    directory = run_directory / TOKEN_DIRECTORY
    by_world: dict[int, dict[int, Path]] = {}
    for path in directory.glob(f"batch-{batch:09d}-rank-*.npz"):
        match = NAME.match(path.name)
        if match is not None:
            by_world.setdefault(int(match[3]), {})[int(match[2])] = path
    if not by_world:
        return []
    # Two only while the ranks write.
    world, paths = max(by_world.items(), key=lambda item: max(path.stat().st_mtime_ns for path in item[1].values()))
    missing = [rank for rank in range(world) if rank not in paths]
    if missing:
        raise ValueError(f"{directory}: batch {batch} lacks the parts of ranks {_few(missing)} of {world}")
    return [paths[rank] for rank in range(world)]


def _arrays(path: Path, names: Iterable[str]) -> dict[str, Any]:
    """Some arrays of a file. Raises: ValueError when it is not what a learner recorded."""
    try:
        # Opened here: numpy leaves a file open that is no archive.
        with ForeignTree(path.parent).open(path.name) as file, np.load(file, allow_pickle=False) as arrays:
            packed = [each for each in arrays.zip.infolist() if each.compress_type or each.file_size > each.compress_size]
            if packed:
                raise ValueError(f"{packed[0].filename[:100]!r} is compressed")
            found = int(arrays["format"])
            if found != FORMAT:
                raise ValueError(f"format {found}, this release reads {FORMAT}")
            return {name: arrays[name] for name in names}
    # MemoryError: an array says that it has more elements than memory has room for.
    except (
        ValueError, KeyError, EOFError, zipfile.BadZipFile, NotImplementedError, AttributeError, TypeError, MemoryError
    ) as error:  # fmt: skip
        raise ValueError(f"{path}: not what a learner recorded: {error}") from error


def _read(path: Path) -> TokenPart:
    fields = _arrays(path, TokenPart.__dataclass_fields__)
    try:
        batch, version = int(fields.pop("batch")), int(fields.pop("policy_version"))
        columns = tuple(str(name) for name in fields.pop("columns").tolist())
        return TokenPart(batch=batch, policy_version=version, columns=columns, **fields)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not what a learner recorded: {error}") from error


def _few(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")

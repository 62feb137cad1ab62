"""The elements that changed since an engine loaded a version, in files from which it patches its live parameters.

The engine's parameters are made from the version's tensors (services/shared/weights/shards.py), and places are those in
the parameters. There is one file for each rank that shares the model. It has two arrays for each parameter: its name
followed by INDICES (int32 or int64, elements from its beginning) and by VALUES (uint16 or uint32: the bits that the
elements have now). A rank without changes gets an empty file, so that a file that is missing is an error.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from gspo_protocol.deltas import ITEM_BYTES, Places, Values
from gspo_protocol.messages import TensorInfo
from gspo_services.rollout.weights.file import write_arrays
from gspo_services.rollout.weights.files import WeightFiles
from gspo_services.shared.weights import HEAD, INDICES, VALUES, Shard, ShardPiece, patch_file

_MAX_INT32: Final = 2**31 - 1
_MAX_UINT32: Final = 2**32 - 1


@dataclass(frozen=True, kw_only=True)
class Touched:
    """Elements of ``item_bytes`` bytes each that changed, counted from byte ``offset`` of the version on: uint32 [any].

    ``values``: what they are now, unsigned [as many]; None: it is in the files.
    """

    offset: int
    item_bytes: int
    places: np.ndarray[Any, np.dtype[np.uint32]]
    values: Values | None = None


class NoPatchError(ValueError):
    """The changes cannot be given to the engine one by one; the text says why."""


@dataclass(frozen=True, kw_only=True)
class _Target:
    """A part of a tensor as one rank has it."""

    rank: int
    parameter: str
    piece: ShardPiece
    index: np.dtype[Any]
    """The type of places in the parameter."""


def write_patch(
    directory: Path,
    files: WeightFiles,
    tensors: Sequence[TensorInfo],
    touched: Sequence[Touched],
    known: Collection[str],
    ranks: Sequence[Mapping[str, Shard]],
) -> int:
    """Write the patch into ``directory`` (created), for an engine that has the parameters ``known``. Returns its bytes.

    ``ranks``: the shards of each rank that shares the model. Raises: NoPatchError for a change of a parameter that is
    unknown or of which a part was not sent; OSError.
    """
    targets = _targets(tensors, known, ranks)
    ends = np.array([info.offset + info.num_bytes for info in tensors])
    found: list[dict[str, tuple[list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]]]]] = [{} for _ in ranks]
    for each in touched:
        values = files.gather(each.offset, each.item_bytes, each.places) if each.values is None else each.values
        at, done = int(np.searchsorted(ends, each.offset, side="right")), 0
        while done < len(each.places):
            info = tensors[at]
            first = (info.offset - each.offset) // each.item_bytes
            until = int(np.searchsorted(each.places, np.uint32(min(first + info.num_bytes // each.item_bytes, _MAX_UINT32))))
            if until > done:
                if not targets[at] and not info.name.endswith(HEAD):
                    raise NoPatchError(f"tensor {info.name} is not in a parameter of the engine that was sent whole")
                places = each.places[done:until].astype(np.int64) - first
                for target in targets[at]:
                    chosen, indices = _in_shard(target.piece, places, each.item_bytes)
                    parts = found[target.rank].setdefault(target.parameter, ([], []))
                    parts[0].append(indices.astype(target.index))
                    parts[1].append(values[done:until][chosen])
            done, at = until, at + 1
    directory.mkdir(parents=True, exist_ok=True)
    return sum(
        write_arrays(
            directory / patch_file(rank),
            {
                name + kind: pieces
                for name, (indices, bits) in parameters.items()
                for kind, pieces in ((INDICES, indices), (VALUES, bits))
            },
        )
        for rank, parameters in enumerate(found)
    )


def _in_shard(piece: ShardPiece, places: Places, item_bytes: int) -> tuple[slice | np.ndarray[Any, Any], Places]:
    """Which of a tensor's ``places`` (ascending) the piece has, and where they are in its shard: int64 [chosen]."""
    begin, width = piece.begin // item_bytes, piece.row_bytes // item_bytes
    rows, columns = piece.rows, (piece.columns[0] // item_bytes, piece.columns[1] // item_bytes)
    if piece.is_run:
        low, high = (int(np.searchsorted(places, row * width)) for row in rows)
        here = places[low:high] if piece.matrix is None else _transposed(places[low:high], piece.matrix[:2])
        return slice(low, high), here + (begin - rows[0] * width)
    row, column = np.divmod(places, width)
    chosen = (column >= columns[0]) & (column < columns[1]) & (row >= rows[0]) & (row < rows[1])
    return chosen, (row[chosen] - rows[0]) * (columns[1] - columns[0]) + column[chosen] - columns[0] + begin


def _transposed(places: Places, matrix: tuple[int, int]) -> Places:
    """Where these elements of matrices of so many rows and columns are once each is transposed."""
    rows, columns = matrix
    before, within = np.divmod(places, rows * columns)
    row, column = np.divmod(within, columns)
    found: Places = before * (rows * columns) + column * rows + row
    return found


def _targets(
    tensors: Sequence[TensorInfo], known: Collection[str], ranks: Sequence[Mapping[str, Shard]]
) -> list[list[_Target]]:
    """For each tensor, the parts of it that ranks have in parameters which the engine knows."""
    found: list[list[_Target]] = [[] for _ in tensors]
    for rank, parameters in enumerate(ranks):
        for name, shard in parameters.items():
            if name not in known:
                continue
            for piece in shard.pieces:
                size = shard.num_bytes // ITEM_BYTES[tensors[piece.tensor].dtype]
                index: np.dtype[Any] = np.dtype(np.int32 if size <= _MAX_INT32 else np.int64)
                found[piece.tensor].append(_Target(rank=rank, parameter=name, piece=piece, index=index))
    return found

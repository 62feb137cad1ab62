"""The elements that changed since an engine loaded a version, in a file from which the engine patches its live parameters.

The engine's parameters are merged from the version's tensors (services.weights.engine_parameters), and places are those in
the parameters. The file has two arrays for each parameter: its name followed by INDICES (int32 or int64, elements from its
beginning) and by VALUES (uint16 or uint32: the bits that the elements have now).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from protocol.deltas import ITEM_BYTES, Values
from protocol.messages import TensorInfo
from services.rollout.weights.file import write_arrays
from services.rollout.weights.files import WeightFiles
from services.weights import HEAD, INDICES, VALUES, layouts

_MAX_INT32: Final = 2**31 - 1
_MAX_UINT32: Final = 2**32 - 1
PATCH_FILE: Final = "patch.safetensors"


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


def write_patch(
    directory: Path, files: WeightFiles, tensors: Sequence[TensorInfo], touched: Sequence[Touched], known: Collection[str]
) -> int:
    """Write the patch into ``directory`` (created), for an engine that has the parameters ``known``. Returns its bytes.

    Raises: NoPatchError for a change of a parameter that is unknown or of which a part was not sent; OSError.
    """
    begins = _begins(tensors, known)
    ends = np.array([info.offset + info.num_bytes for info in tensors])
    found: dict[str, tuple[list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]]]] = {}
    for each in touched:
        values = files.gather(each.offset, each.item_bytes, each.places) if each.values is None else each.values
        at, done = int(np.searchsorted(ends, each.offset, side="right")), 0
        while done < len(each.places):
            info = tensors[at]
            first = (info.offset - each.offset) // each.item_bytes
            until = int(np.searchsorted(each.places, np.uint32(min(first + info.num_bytes // each.item_bytes, _MAX_UINT32))))
            if until > done:
                parameter, begin, size = begins[at]
                if not parameter and info.name != HEAD:
                    raise NoPatchError(f"tensor {info.name} is not in a parameter of the engine that was sent whole")
                if parameter:
                    kind: np.dtype[Any] = np.dtype(np.int32 if size <= _MAX_INT32 else np.int64)
                    indices, bits = found.setdefault(parameter, ([], []))
                    indices.append(each.places[done:until].astype(kind) + kind.type(begin - first))
                    bits.append(values[done:until])
            done, at = until, at + 1
    directory.mkdir(parents=True, exist_ok=True)
    arrays = {
        name + kind: pieces
        for name, (indices, bits) in found.items()
        for kind, pieces in ((INDICES, indices), (VALUES, bits))
    }
    return write_arrays(directory / PATCH_FILE, arrays)


def _begins(tensors: Sequence[TensorInfo], known: Collection[str]) -> list[tuple[str, int, int]]:
    """For each tensor the engine's parameter that has it ("": none), its first element there, and the parameter's size."""
    found = [("", 0, 0)] * len(tensors)
    for layout in layouts(tensors).values():
        if not layout.complete or layout.name not in known:
            continue
        item_bytes = ITEM_BYTES[tensors[layout.indices[0]].dtype]
        size = (sum(tensors[index].num_bytes for index in layout.indices) + layout.padding_bytes) // item_bytes
        begin = 0
        for index in layout.indices:
            found[index] = (layout.name, begin, size)
            begin += tensors[index].num_bytes // item_bytes
    return found

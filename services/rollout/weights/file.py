"""The header of a safetensors file, and small files of arrays, without torch.

The format (https://huggingface.co/docs/safetensors): 8 bytes of little-endian header length, the header as JSON, the tensors
one after the other. Since 0.8 the package's own writer wants the raw addresses of buffers.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from gspo_protocol.messages import TensorInfo

_DTYPES: Final = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_ARRAY_DTYPES: Final = {"int32": "I32", "int64": "I64", "uint16": "U16", "uint32": "U32"}
_ALIGNMENT: Final = 8
Entry = tuple[str, str, list[int], int]
"""A tensor's name, its type as safetensors calls it, its shape and its bytes."""


def header_of(tensors: Sequence[TensorInfo]) -> bytes:
    """Return the file header that precedes the bytes of these tensors, in the order given.

    Raises: ValueError for a name that occurs twice or is not text (half a surrogate pair).
    """
    return _header((info.name, _DTYPES[info.dtype], info.shape, info.num_bytes) for info in tensors)


def write_arrays(path: Path, arrays: Mapping[str, Sequence[np.ndarray[Any, Any]]]) -> int:
    """Write arrays of one dimension, each given in pieces of one type, to ``path``. Returns the file's bytes.

    Raises: ValueError as ``header_of``; OSError.
    """
    entries = [
        (name, _ARRAY_DTYPES[str(pieces[0].dtype)], [sum(map(len, pieces))], sum(piece.nbytes for piece in pieces))
        for name, pieces in arrays.items()
    ]
    header = _header(entries)
    with path.open("wb") as file:
        file.write(header)
        for pieces in arrays.values():
            for piece in pieces:
                file.write(np.ascontiguousarray(piece).data)
    return len(header) + sum(num_bytes for *_, num_bytes in entries)


def _header(entries: Iterable[Entry]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape, num_bytes in entries:
        if name in header:
            raise ValueError(f"tensor {name} occurs twice")
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    # Not escaped: readers refuse half a surrogate pair, and so does encode().
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text

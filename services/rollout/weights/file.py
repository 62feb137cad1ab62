"""Writes a safetensors file without copying a tensor, and without torch.

The format (https://huggingface.co/docs/safetensors): 8 bytes of little-endian header length, the header as JSON, the tensors
one after the other. Since 0.8 the package's own writer wants the raw addresses of buffers.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from protocol.messages import TensorInfo

_DTYPES: Final = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_ALIGNMENT: Final = 8


def write_safetensors(path: Path, tensors: Sequence[tuple[TensorInfo, bytes | bytearray | memoryview]]) -> None:
    """Write tensors (little-endian, row-major bytes) to ``path``, in the order given.

    Raises: ValueError for a name that occurs twice or is not text (half a surrogate pair), or bytes of another length than
    the tensor says.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for info, data in tensors:
        if info.name in header:
            raise ValueError(f"tensor {info.name} occurs twice")
        if len(data) != info.num_bytes:
            raise ValueError(f"tensor {info.name} has {len(data)} bytes, its description says {info.num_bytes}")
        header[info.name] = {
            "dtype": _DTYPES[info.dtype],
            "shape": info.shape,
            "data_offsets": [offset, offset + len(data)],
        }
        offset += len(data)
    # Not escaped: readers refuse half a surrogate pair, and so does encode().
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for _, data in tensors:
            file.write(data)

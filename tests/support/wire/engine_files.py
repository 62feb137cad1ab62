"""A file that an engine loads."""

from collections.abc import Sequence
from pathlib import Path

from gspo_protocol.messages import TensorInfo
from gspo_services.rollout.weights.file import header_of


def write_safetensors(path: Path, tensors: Sequence[tuple[TensorInfo, bytes | bytearray | memoryview]]) -> None:
    """Write tensors to ``path``, in the order given. Raises: ValueError as ``header_of``, or for a wrong number of bytes."""
    for info, data in tensors:
        if len(data) != info.num_bytes:
            raise ValueError(f"tensor {info.name} has {len(data)} bytes, its description says {info.num_bytes}")
    path.write_bytes(header_of([info for info, _ in tensors]) + b"".join(data for _, data in tensors))

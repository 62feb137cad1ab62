"""The adapters of one version, each as peft has it: of several, the rows of A and the columns of B that are its own."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from gspo_protocol.digests import tensor_digest
from gspo_protocol.messages import AdapterInfo, TensorInfo
from gspo_services.shared.weights import Buffer

_ELEMENTS: Final[Mapping[str, np.dtype[Any]]] = {
    "float32": np.dtype("<u4"), "bfloat16": np.dtype("<u2"), "float16": np.dtype("<u2"),
}  # fmt: skip
"""Bits are moved, not numbers."""


@dataclass(frozen=True, kw_only=True)
class AdapterPart:
    """One adapter of a version."""

    name: str
    """In the run; empty: the version has no other."""
    info: AdapterInfo
    """With the probe of this adapter alone."""
    tensors: Sequence[TensorInfo]
    data: Sequence[Buffer]


def adapter_parts(info: AdapterInfo, tensors: Sequence[TensorInfo], data: Sequence[Buffer]) -> Iterator[AdapterPart]:
    """Yield the adapters of a version whose matrices were checked (``require_matrices``)."""
    if not info.names:
        yield AdapterPart(name="", info=info, tensors=tensors, data=data)
        return
    number = len(info.probe_logprobs) // len(info.names)
    for place, name in enumerate(info.names):
        own = [_own(each, content, place, info.rank) for each, content in zip(tensors, data, strict=True)]
        offsets = np.cumsum([0, *map(len, own)])
        yield AdapterPart(
            name=name,
            info=msgspec.structs.replace(
                info, names=[], probe_logprobs=info.probe_logprobs[place * number : (place + 1) * number]
            ),
            tensors=[
                msgspec.structs.replace(
                    each, shape=_shape(each, info.rank), offset=offset, num_bytes=len(content), digest=tensor_digest(content)
                )
                for each, content, offset in zip(tensors, own, offsets[:-1].tolist(), strict=True)
            ],
            data=own,
        )


def _is_a(tensor: TensorInfo) -> bool:
    return ".lora_A." in tensor.name


def _shape(tensor: TensorInfo, rank: int) -> list[int]:
    rows, columns = tensor.shape
    return [rank, columns] if _is_a(tensor) else [rows, rank]


def _own(tensor: TensorInfo, content: Buffer, place: int, rank: int) -> bytes:
    matrix: np.ndarray[Any, Any] = np.frombuffer(content, _ELEMENTS[tensor.dtype]).reshape(tensor.shape)
    own = slice(place * rank, (place + 1) * rank)
    return (matrix[own] if _is_a(tensor) else matrix[:, own]).tobytes()

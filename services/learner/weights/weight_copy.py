"""The weights of one moment in this process's own memory, so that they can be published while training continues."""

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from gspo.model.serving_layout import ServedParameter, ServedPart
from gspo_protocol.digests import tensor_digest, version_digest
from gspo_protocol.messages import AdapterInfo, TensorInfo

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""By their names on the wire and in the settings."""
DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class CopiedTensor:
    """One tensor's bytes in this process's own memory."""

    name: str
    dtype: str
    shape: list[int]
    data: np.ndarray[Any, np.dtype[np.uint8]]


class WeightCopy:
    """The weights of one moment, copied to the CPU: training may continue, and change the originals."""

    adapter: AdapterInfo | None = None
    """What the tensors are if they are an adapter's (gspo_services.learner.weights.adapter_copy)."""

    def __init__(self, copied: Iterable[tuple[Tensor, Sequence[ServedPart]]], *, from_device: bool = False) -> None:
        """``copied``: for each parameter its elements in row-major order, and what they are served as. ``from_device``: they
        are in pinned memory, which this process never gives back."""
        self.from_device = from_device
        self._copied = list(copied)
        self._tensors: list[CopiedTensor] | None = None
        self._digests: list[str] = []

    @property
    def tensors(self) -> list[CopiedTensor]:
        """The tensors as served; made at the first use, because training waits only for the copy."""
        if self._tensors is None:
            self._tensors = [tensor for values, parts in self._copied for tensor in _cut(values, parts)]
            self._copied = []
        return self._tensors

    def take(self) -> list[CopiedTensor]:
        """Hand over the tensors, so that memory is freed as soon as a parameter's tensors are dropped."""
        tensors, self._tensors = self.tensors, []
        return tensors

    def digests(self) -> list[str]:
        """Compute every tensor's digest, in order, on all cores: hashing is the slowest part of a publication."""
        if not self._digests:
            with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
                # The largest first: one thread hashes it alone, while the others do the rest.
                data = [tensor.data for tensor in self.tensors]
                order = sorted(range(len(data)), key=lambda index: -data[index].nbytes)
                found = {index: pool.submit(tensor_digest, data[index].data) for index in order}
                self._digests = [found[index].result() for index in range(len(data))]
        return self._digests

    def digest(self) -> str:
        """Return the digest that a version of these weights has."""
        return version_digest(described(self.tensors, self.digests()), self.adapter)


def copy_weights(weights: Iterable[tuple[str, Tensor]]) -> WeightCopy:
    """Copy ``weights`` (name in the serving layout, tensor on any device). See ``copy_parameters``."""
    return copy_parameters(ServedParameter.alone(name, tensor) for name, tensor in weights)


def copy_parameters(parameters: Iterable[ServedParameter]) -> WeightCopy:
    """Copy ``parameters``, whose elements may be on any device. Training waits only for this.

    Raises: ValueError when a dtype cannot be sent.
    """
    copied: list[tuple[Tensor, Sequence[ServedPart]]] = []
    on_device = False
    for parameter in parameters:
        values = parameter.values
        if values.dtype not in DTYPE_NAMES:
            raise ValueError(
                f"tensor {parameter.parts[0].name} has dtype {values.dtype}: one of {sorted(DTYPE_NAMES.values())} can be "
                "served"
            )
        on_device = on_device or values.is_cuda
        copied.append((_to_host(values), parameter.parts))
    if on_device:
        torch.cuda.synchronize()
    return WeightCopy(copied, from_device=on_device)


def _to_host(values: Tensor) -> Tensor:
    """Copy into this process's own memory. A copy from a GPU is complete after a synchronisation."""
    if not values.is_cuda:
        # Copied on the CPU too: the tensor may be a buffer that is filled again for the next one.
        return values.to("cpu", copy=True)
    # PyTorch keeps pinned memory for the next export: to pin it takes longer than to copy.
    own = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    own.copy_(values, non_blocking=True)
    # The next parameter's gather must not overwrite data that is still being copied.
    values.record_stream(torch.cuda.current_stream(values.device))
    return own


def _cut(values: Tensor, parts: Sequence[ServedPart]) -> Iterator[CopiedTensor]:
    data, size = values.view(torch.uint8).numpy(), values.element_size()
    for part in parts:
        yield CopiedTensor(
            name=part.name,
            dtype=DTYPE_NAMES[values.dtype],
            shape=list(part.shape),
            data=data[part.start * size : (part.start + part.num_elements) * size],
        )


def described(tensors: Sequence[CopiedTensor], digests: Sequence[str]) -> list[TensorInfo]:
    """Return the tensors as in a manifest, end to end."""
    found: list[TensorInfo] = []
    offset = 0
    for tensor, digest in zip(tensors, digests, strict=True):
        found.append(
            TensorInfo(
                name=tensor.name,
                dtype=tensor.dtype,  # type: ignore[arg-type]
                shape=tensor.shape,
                offset=offset,
                num_bytes=tensor.data.nbytes,
                digest=digest,
            )
        )
        offset += tensor.data.nbytes
    return found

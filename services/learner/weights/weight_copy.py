"""The weights of one moment in this process's own memory, so that they can be published while training continues."""

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gspo.model.serving_layout import ServedParameter, ServedPart
from gspo_protocol.digests import version_digest
from gspo_protocol.messages import AdapterInfo, Probe, TensorInfo
from gspo_protocol.tiles import Sums
from gspo_services.learner.weights.copy_memory import Bytes, CopyMemory
from gspo_services.learner.weights.version_layout import VersionLayout

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""By their names on the wire and in the settings."""
DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_HOST: Final = torch.device("cpu")


class CopiedRange(NamedTuple):
    """Bytes of a version, from byte ``begin`` of it on, in this process's own memory."""

    begin: int
    data: Bytes

    @property
    def end(self) -> int:
        """The byte of the version after the last one."""
        return self.begin + len(self.data)


class VersionRange(NamedTuple):
    """Elements that are to be copied to byte ``begin`` of a version: ``values`` [any], on any device."""

    begin: int
    values: Tensor


class WeightCopy:
    """The weights of one moment, or one rank's part of them, copied: training may continue, and change the originals."""

    adapter: AdapterInfo | None = None
    """What the tensors are if they are an adapter's (gspo_services.learner.weights.adapter_copy)."""
    probe: Probe | None = None
    """What an engine must compute with them; None: nothing is known, or another rank knows it."""

    def __init__(self, layout: VersionLayout, pieces: Sequence[CopiedRange]) -> None:
        """``pieces``: in the order of the version, without empty ones."""
        self.layout = layout
        self.pieces = pieces
        self._sums: list[Sums] = []

    def sums(self) -> list[Sums]:
        """Return the sums of the tiles that each piece touches; computed once, on all cores."""
        if not self._sums:
            with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
                # The largest first: one thread sums it alone, while the others do the rest.
                order = sorted(range(len(self.pieces)), key=lambda index: -len(self.pieces[index].data))
                found = {index: pool.submit(self.layout.sums, *self.pieces[index]) for index in order}
                self._sums = [found[index].result() for index in range(len(self.pieces))]
        return self._sums

    def row(self) -> Sums:
        """Return the sums of all tiles of the version: zeros where this is not all of it. Rows of parts add up."""
        row = np.zeros(self.layout.num_tiles, dtype=np.uint64)
        for piece, sums in zip(self.pieces, self.sums(), strict=True):
            first, last = self.layout.row(piece.begin, piece.end)
            row[first:last] += sums
        return row

    def tensors(self) -> list[TensorInfo]:
        """Describe the tensors as in a manifest, end to end, with their digests. Of whole weights only."""
        return self.layout.described(self.row())

    def digest(self) -> str:
        """Return the digest that a version of these weights has. Of whole weights only."""
        return version_digest(self.tensors(), self.adapter)


def copy_weights(weights: Iterable[tuple[str, Tensor]]) -> WeightCopy:
    """Copy ``weights`` (name in the serving layout, tensor on any device). See ``copy_parameters``."""
    return copy_parameters(ServedParameter.alone(name, tensor) for name, tensor in weights)


def copy_parameters(parameters: Iterable[ServedParameter], memory: CopyMemory | None = None) -> WeightCopy:
    """Copy whole ``parameters``, whose elements may be on any device. Training waits only for this.

    ``memory``: where the copies' comes from; None: memory of their own. Raises: ValueError when a dtype cannot be sent.
    """
    described: list[tuple[ServedPart, str]] = []

    def ranges() -> Iterator[VersionRange]:
        begin = 0
        for parameter in parameters:
            dtype = served_dtype(parameter.parts[0].name, parameter.values)
            for each in in_order(parameter):
                described.extend((part, dtype) for part in each.parts)
                yield VersionRange(begin, each.values)
                begin += each.values.nbytes

    pieces = copy_ranges(ranges(), memory)
    return WeightCopy(VersionLayout.of(described), pieces)


def copy_ranges(ranges: Iterable[VersionRange], memory: CopyMemory | None = None) -> list[CopiedRange]:
    """Copy ranges of a version, in its order. See ``copy_parameters``."""
    memory = CopyMemory() if memory is None else memory
    pieces: list[CopiedRange] = []
    on_device = False
    for begin, values in ranges:
        on_device = on_device or _is_on_device(values)
        if values.numel():
            pieces.append(CopiedRange(begin, _copied(values, memory)))
    if on_device:
        _wait_for_copies()
    memory.keep_for(sum(piece.data.nbytes for piece in pieces))
    return pieces


def served_dtype(name: str, values: Tensor) -> str:
    """Return the name of a tensor's dtype. Raises: ValueError when it cannot be sent."""
    if values.dtype not in DTYPE_NAMES:
        raise ValueError(f"tensor {name} has dtype {values.dtype}: one of {sorted(DTYPE_NAMES.values())} can be served")
    return DTYPE_NAMES[values.dtype]


def in_order(parameter: ServedParameter) -> Iterator[ServedParameter]:
    """The parameter with its tensors as they lie in it; each tensor alone where they are not one after the other."""
    parts = parts_in_order(parameter.parts, parameter.values.numel())
    if parts is not None:
        yield ServedParameter(parameter.values, parts)
        return
    yield from (ServedParameter.alone(name, tensor) for name, tensor in parameter.tensors())


def parts_in_order(parts: Sequence[ServedPart], num_elements: int) -> list[ServedPart] | None:
    """Return a parameter's tensors as they lie in it; None where they are not one after the other, and all of it."""
    found = sorted(parts, key=lambda part: (part.start, part.num_elements))
    ends = [part.start + part.num_elements for part in found]
    return found if [part.start for part in found] == [0, *ends[:-1]] and ends[-1] == num_elements else None


def _copied(values: Tensor, memory: CopyMemory) -> Bytes:
    """A copy from a device is complete after ``_wait_for_copies``: the host waits once a version, not for each parameter."""
    on_device = _is_on_device(values)
    # Copied on the CPU too: the tensor may be a buffer that is filled again for the next one.
    own, data = memory.take(values.numel() * values.element_size(), pinned=on_device)
    own.view(values.dtype).copy_(values.reshape(-1), non_blocking=on_device)
    if on_device:
        _keep_until_copied(values)
    return data


def _is_on_device(values: Tensor) -> bool:
    return values.device != _HOST


def _keep_until_copied(values: Tensor) -> None:
    """The next parameter's gather must not overwrite data that is still being copied."""
    values.record_stream(torch.cuda.current_stream(values.device))


def _wait_for_copies() -> None:
    torch.cuda.synchronize()

"""The weights of one moment in this process's own memory, so that they can be published while training continues."""

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from gspo.model.serving_layout import ServedParameter, ServedPart
from gspo_protocol.digests import sums_digest, tensor_digest, version_digest
from gspo_protocol.messages import AdapterInfo, TensorInfo
from gspo_protocol.tiles import TILE_BYTES, num_tiles, tile_sums
from gspo_services.learner.weights.copy_memory import Bytes, CopyMemory

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""By their names on the wire and in the settings."""
DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_HOST: Final = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class CopiedParameter:
    """The bytes of one parameter in this process's own memory, and the tensors that lie in it, one after the other."""

    data: Bytes
    item_bytes: int
    dtype: str
    tensors: Sequence[ServedPart]

    def sizes(self) -> list[int]:
        """Return the bytes of each tensor."""
        return [each.num_elements * self.item_bytes for each in self.tensors]

    def parts(self) -> list[memoryview]:
        """Return the bytes of each tensor."""
        sizes = self.sizes()
        return [self.data[end - size : end].data for end, size in zip(accumulate(sizes), sizes, strict=True)]

    def digests(self) -> list[str]:
        """Compute each tensor's digest."""
        sizes = self.sizes()
        if any(size % TILE_BYTES for size in sizes[:-1]):
            return [tensor_digest(part) for part in self.parts()]
        # The tensors' tiles are the parameter's: thousands of experts are read at once.
        sums, found, first = tile_sums(self.data.data), [], 0
        for size in sizes:
            found.append(sums_digest(sums[first : first + num_tiles(size)], size))
            first += num_tiles(size)
        return found


class WeightCopy:
    """The weights of one moment, copied to the CPU: training may continue, and change the originals."""

    adapter: AdapterInfo | None = None
    """What the tensors are if they are an adapter's (gspo_services.learner.weights.adapter_copy)."""

    def __init__(self, pieces: Iterable[CopiedParameter]) -> None:
        self.pieces = list(pieces)
        self._tensors: list[TensorInfo] = []

    def tensors(self) -> list[TensorInfo]:
        """Describe the tensors as in a manifest, end to end, with their digests; computed once, on all cores."""
        if not self._tensors:
            self._tensors = list(_described(self.pieces, self._digests()))
        return self._tensors

    def _digests(self) -> list[list[str]]:
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            # The largest first: one thread hashes it alone, while the others do the rest.
            order = sorted(range(len(self.pieces)), key=lambda index: -self.pieces[index].data.nbytes)
            found = {index: pool.submit(self.pieces[index].digests) for index in order}
            return [found[index].result() for index in range(len(self.pieces))]

    def digest(self) -> str:
        """Return the digest that a version of these weights has."""
        return version_digest(self.tensors(), self.adapter)


def copy_weights(weights: Iterable[tuple[str, Tensor]]) -> WeightCopy:
    """Copy ``weights`` (name in the serving layout, tensor on any device). See ``copy_parameters``."""
    return copy_parameters(ServedParameter.alone(name, tensor) for name, tensor in weights)


def copy_parameters(parameters: Iterable[ServedParameter], memory: CopyMemory | None = None) -> WeightCopy:
    """Copy ``parameters``, whose elements may be on any device. Training waits only for this.

    ``memory``: where the copies' comes from; None: memory of their own. Raises: ValueError when a dtype cannot be sent.
    """
    memory = CopyMemory() if memory is None else memory
    pieces: list[CopiedParameter] = []
    on_device = False
    for parameter in parameters:
        if parameter.values.dtype not in DTYPE_NAMES:
            raise ValueError(
                f"tensor {parameter.parts[0].name} has dtype {parameter.values.dtype}: one of "
                f"{sorted(DTYPE_NAMES.values())} can be served"
            )
        on_device = on_device or _is_on_device(parameter.values)
        pieces += [_copied(each, memory) for each in _in_order(parameter)]
    if on_device:
        _wait_for_copies()
    memory.keep_for(sum(piece.data.nbytes for piece in pieces))
    return WeightCopy(pieces)


def _in_order(parameter: ServedParameter) -> Iterator[ServedParameter]:
    """The parameter with its tensors as they lie in it; each tensor alone where they are not one after the other."""
    parts = sorted(parameter.parts, key=lambda part: (part.start, part.num_elements))
    ends = [part.start + part.num_elements for part in parts]
    if [part.start for part in parts] == [0, *ends[:-1]] and ends[-1] == parameter.values.numel():
        yield ServedParameter(parameter.values, parts)
        return
    yield from (ServedParameter.alone(name, tensor) for name, tensor in parameter.tensors())


def _copied(parameter: ServedParameter, memory: CopyMemory) -> CopiedParameter:
    """A copy from a device is complete after ``_wait_for_copies``: the host waits once a version, not for each parameter."""
    values = parameter.values
    on_device = _is_on_device(values)
    # Copied on the CPU too: the tensor may be a buffer that is filled again for the next one.
    own, data = memory.take(values.numel() * values.element_size(), pinned=on_device)
    own.view(values.dtype).copy_(values, non_blocking=on_device)
    if on_device:
        _keep_until_copied(values)
    return CopiedParameter(
        data=data, item_bytes=values.element_size(), dtype=DTYPE_NAMES[values.dtype], tensors=parameter.parts
    )


def _is_on_device(values: Tensor) -> bool:
    return values.device != _HOST


def _keep_until_copied(values: Tensor) -> None:
    """The next parameter's gather must not overwrite data that is still being copied."""
    values.record_stream(torch.cuda.current_stream(values.device))


def _wait_for_copies() -> None:
    torch.cuda.synchronize()


def _described(pieces: Sequence[CopiedParameter], digests: Sequence[Sequence[str]]) -> Iterator[TensorInfo]:
    offset = 0
    for piece, own in zip(pieces, digests, strict=True):
        for part, num_bytes, digest in zip(piece.tensors, piece.sizes(), own, strict=True):
            yield TensorInfo(part.name, piece.dtype, list(part.shape), offset, num_bytes, digest)  # type: ignore[arg-type]
            offset += num_bytes

"""Sums the live parameters of an SGLang server by tiles of the version's tensors: a loader that loads nothing.

So an engine on any device is compared with what the learner published, each rank by the part that it has: sums of parts add
up (``gspo_protocol.tiles``). SGLang's own /weights_checker hashes parameters as SGLang merges and cuts them, which nobody
can know who has not all of their bytes.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import torch

from gspo_protocol.digests import sums_digest
from gspo_protocol.tiles import TILE_BYTES
from gspo_services.shared.sglang_patching import answered
from gspo_services.shared.torch_tiles import rectangle_sums, tile_sums
from gspo_services.shared.weights import PlacedParameter, Places, places_file, source_of, sums_file


def report(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Sum ``model`` as the files in the directory that the one tensor names say. Each tensor rank answers for itself."""
    from sglang.srt.utils.weight_checker import _is_skip_weight_check

    def sums(directory: Path, rank: int) -> dict[str, Any]:
        state = {
            name: tensor
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
            if not _is_skip_weight_check(name, tensor)
        }
        derived = {name for name in state if is_derived(name, state)}
        state = {name: tensor for name, tensor in state.items() if name not in derived}
        sizes, others = sum_parameters(state, directory, rank)
        return {"sizes": sizes, "others": others}

    answered(named_tensors, sums)


def sum_parameters(state: dict[str, torch.Tensor], directory: Path, rank: int = 0) -> tuple[dict[str, int], dict[str, str]]:
    """Write the sums of the parameters that this rank's file in ``directory`` places, in its order, where they are as large
    as it says. Returns the bytes of each parameter, and the digests of those that it does not place.

    Raises: OSError, MsgspecError.
    """
    sizes = {name: tensor.nbytes for name, tensor in state.items()}
    placed = msgspec.msgpack.decode((directory / places_file(rank)).read_bytes(), type=Places)
    with torch.no_grad():
        sums = [
            each
            for name, parameter in placed.items()
            if sizes.get(name) == parameter.num_bytes
            for each in _sums(_bytes_of(state[name], parameter), parameter)
        ]
        # One transfer, and the host waits once.
        row = torch.cat(sums) if sums else torch.empty(0, dtype=torch.int64)
        others = {name: _digest(tensor) for name, tensor in state.items() if name not in placed}
    (directory / sums_file(rank)).write_bytes(row.cpu().numpy().astype("<i8", copy=False).tobytes())
    return sizes, others


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _digest(tensor: torch.Tensor) -> str:
    return sums_digest(tile_sums(_bytes(tensor))[1].cpu().numpy().view("<u8"), tensor.nbytes)


def is_derived(name: str, state: Mapping[str, torch.Tensor]) -> bool:
    """Return whether SGLang has made a tensor from a parameter (a scale to which one is added), and it is right."""
    source = state.get(source_of(name))
    return source is not None and source is not state[name] and torch.equal(state[name], source.detach() + 1.0)


def _bytes_of(tensor: torch.Tensor, parameter: PlacedParameter) -> torch.Tensor:
    return _bytes(tensor.transpose(-1, -2) if parameter.transposed else tensor)


def _sums(data: torch.Tensor, parameter: PlacedParameter) -> Iterator[torch.Tensor]:
    begin = 0
    for rectangle, alike in groupby(parameter.rectangles):
        row_bytes, first, last, left, right = rectangle
        number, size = len(list(alike)), (last - first) * (right - left)
        if first * row_bytes % TILE_BYTES == 0 == (last - first) * row_bytes % TILE_BYTES:
            # Hundreds of experts are one rectangle, and on a GPU a few kernels.
            rows, times = (first, first + number * (last - first)), 1
        else:
            rows, times = (first, last), number
        for _ in range(times if size else 0):
            end = begin + size * number // times
            yield rectangle_sums(data[begin:end], row_bytes, rows, (left, right))
            begin = end
    if begin < len(data):
        yield tile_sums(data[begin:])[1]

"""Patches live parameters of an SGLang server, on any device: a loader for stock SGLang's --custom-weight-loader.

SGLang's own ways replace whole tensors. Here a file names elements of the parameters as they lie in memory, and their bits.
The file is checked in full before the first element changes, so that a file that does not fit changes nothing.

SGLang 0.5.23 drops what a loader returns and ends the server for what it raises. So every outcome goes into a file beside
the patch.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open

from gspo_services.shared.weights import INDICES, VALUES, answer_file, patch_file

_BITS: Final = {2: torch.int16, 4: torch.int32}
_SAME_BITS: Final = {torch.uint16: torch.int16, torch.uint32: torch.int32}
STEP: Final = 4 * 2**20
"""Elements that are on the device beside the parameters at a time."""


def apply(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Patch ``model`` from the directory that the one tensor names. Each tensor rank reads and answers for itself."""
    answered(named_tensors, lambda directory, rank: {"elements": patch_model(model, directory, rank)})


def answered(named_tensors: Sequence[tuple[str, torch.Tensor]], work: Callable[[Path, int], dict[str, Any]]) -> None:
    """Do ``work`` for this tensor rank in the directory that the one tensor names, and leave what it returns there."""
    from sglang.srt.runtime_context import get_parallel

    ((_, path),) = named_tensors
    directory, rank = Path(bytes(path.cpu().tolist()).decode()), int(get_parallel().tp_rank)
    try:
        answer = work(directory, rank)
    except Exception as error:  # noqa: BLE001 - whatever is raised here would end the server
        answer = {"error": f"{type(error).__name__}: {error}"}
    written = directory / f"{answer_file(rank)}.new"
    try:
        written.write_text(json.dumps(answer), encoding="utf-8")
        os.replace(written, directory / answer_file(rank))
    except OSError:
        return  # Whoever asked finds no answer.


def patch_model(model: Any, directory: Path, rank: int) -> int:
    """``patch_parameters`` of a model, and anew what it keeps that was made from them."""
    number = patch_parameters(dict(model.named_parameters()), directory, rank)
    if hasattr(model, "post_load_weights"):
        model.post_load_weights()
    for module in model.modules():
        if hasattr(module, "refresh_gemma_weight"):
            module.refresh_gemma_weight()
    return number


def patch_parameters(parameters: dict[str, torch.Tensor], directory: Path, rank: int = 0) -> int:
    """Write the elements named in this rank's file in ``directory`` into ``parameters``. Returns how many there were.

    Raises: ValueError, before anything changes, when an array does not fit; OSError, SafetensorError.
    """
    path = directory / patch_file(rank)
    fitting: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    with safe_open(path, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 - it is no dict
            if key.endswith(INDICES):
                name = key.removesuffix(INDICES)
                if name not in parameters:
                    raise ValueError(f"the model has no parameter {name}")
                fitting.append(_fitting(name, parameters[name], file.get_tensor(key), file.get_tensor(name + VALUES)))
        with torch.no_grad():
            for bits, indices, values in fitting:
                for begin in range(0, len(indices), STEP):
                    places, part = (each[begin : begin + STEP].to(bits.device) for each in (indices, values))
                    bits[places] = part
    return sum(len(indices) for _, indices, _ in fitting)


def _fitting(
    name: str, parameter: torch.Tensor, indices: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The parameter's bits in one row, the places in it and the new bits. Raises: ValueError."""
    if not parameter.is_contiguous() or values.element_size() != parameter.element_size() or len(indices) != len(values):
        raise ValueError(
            f"{len(indices)} places and {len(values)} values of {values.element_size()} bytes do not fit {name}, which has "
            f"{parameter.numel()} elements of {parameter.element_size()} bytes"
        )
    if len(indices) and (int(indices.min()) < 0 or int(indices.max()) >= parameter.numel()):
        raise ValueError(
            f"places {int(indices.min())} to {int(indices.max())} of {name}, which has {parameter.numel()} elements"
        )
    bits = parameter.data.view(-1).view(_BITS[parameter.element_size()])
    return bits, indices, values.view(_SAME_BITS.get(values.dtype, values.dtype))

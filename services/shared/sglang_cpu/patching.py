"""Patches live parameters: /update_weights_from_disk with the load format of ``gspo_services.shared.weights.patches``.

SGLang's own ways replace whole tensors. Here a file names elements of the parameters as they lie in memory, and their bits.
The file is checked in full before the first element changes, so that a file that does not fit changes nothing.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open

from gspo_services.shared.weights import ABILITY, INDICES, LOAD_FORMAT, VALUES, patch_file

_BITS: Final = {2: torch.int16, 4: torch.int32}
_SAME_BITS: Final = {torch.uint16: torch.int16, torch.uint32: torch.int32}


def enable_patches(weight_updater: Any) -> None:
    """Let ``WeightUpdater`` of SGLang's module ``weight_updater`` accept patches, beside everything that it accepts."""
    load: Callable[..., tuple[bool, str]] = weight_updater.WeightUpdater.update_weights_from_disk

    def update_weights_from_disk(
        self: Any, model_path: str, load_format: str, *others: Any, **more: Any
    ) -> tuple[bool, str]:
        if load_format != LOAD_FORMAT:
            return load(self, model_path, load_format, *others, **more)
        self._assert_weight_cache_inactive("update_weights_from_disk")
        try:
            number = patch_parameters(dict(self.get_model().named_parameters()), Path(model_path), self.tp_rank)
        except Exception as error:  # noqa: BLE001 - it becomes the answer; whatever is raised here would end the server
            return False, f"the parameters were not patched: {type(error).__name__}: {error}"
        return True, f"{number} elements patched."

    weight_updater.WeightUpdater.update_weights_from_disk = update_weights_from_disk


def announce_patches(server_args: Any) -> None:
    """Let /server_info say that this server accepts patches."""
    named = list(server_args.custom_weight_loader or [])
    if ABILITY not in named:
        server_args.custom_weight_loader = [*named, ABILITY]


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
                bits[indices] = values
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

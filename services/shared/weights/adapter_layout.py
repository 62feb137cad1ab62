"""Adapters (LoRA) that are published as such: their names in peft's files, and how SGLang lays them out in a slot.

A version's tensors are the A and B of each projection of attention, under the names of peft's files. SGLang puts A and B of
q, k and v one below the other, as it does with the weights themselves:

    <layer>.qkv_proj.lora_A     q.A, k.A, v.A        [3 rank, in]
    <layer>.qkv_proj.lora_B     q.B, k.B, v.B        [out of all three, rank]
    <layer>.o_proj.lora_A, B    as they are
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gspo_protocol.messages import AdapterInfo, TensorInfo
from gspo_services.shared.weights.checksums import Checksum
from gspo_services.shared.weights.engine_parameters import Buffer

PEFT_PREFIX: Final = "base_model.model."
"""Of every name in a file of peft's."""
MODULES: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
"""What an adapter that is published as such adapts: all projections of attention, and nothing else."""
SLOT: Final = "gspo-slot:"
"""Begins the names under which our plug-in for SGLang on a CPU reports what lies in a slot."""
REPORTS_SLOTS: Final = "gspo_services.shared.sglang_cpu.lora_slots.slots"
"""Among the custom weight loaders of /server_info: this server reports what lies in its slots."""
_MATRIX: Final = re.compile(
    rf"{re.escape(PEFT_PREFIX)}model\.layers\.(?P<layer>\d+)\.self_attn\.(?P<part>[qkvo])_proj\.lora_(?P<side>[AB])\.weight"
)
_SIDES: Final = ("A", "B")


def slot_name(adapter: str, layer: int, module: str, side: str) -> str:
    """The name under which one matrix in the slot of an adapter is reported. It has no part of a parameter's name."""
    return f"{SLOT}{adapter}/{layer}.{module}.lora_{side}"


def peft_config(adapter: AdapterInfo) -> dict[str, Any]:
    """adapter_config.json of an adapter."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": list(adapter.modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


def require_matrices(adapter: AdapterInfo, tensors: Sequence[TensorInfo]) -> None:
    """Check that these are A and B of every module in every layer, of this rank for each of several adapters. Raises:
    ValueError that names the first that is not."""
    found: dict[int, set[tuple[str, str]]] = {}
    for info in tensors:
        match = _MATRIX.fullmatch(info.name)
        module = f"{match['part']}_proj" if match else ""
        if match is None or module not in adapter.modules:
            raise ValueError(f"tensor {info.name} is no matrix of an adapter of {', '.join(adapter.modules)}")
        rank = info.shape[0 if match["side"] == "A" else -1] if len(info.shape) == len(_SIDES) else 0
        if rank != adapter.rank * max(1, len(adapter.names)):
            several = f", of {len(adapter.names)} adapters" if adapter.names else ""
            raise ValueError(f"tensor {info.name} has shape {info.shape}, and the adapter's rank is {adapter.rank}{several}")
        found.setdefault(int(match["layer"]), set()).add((module, match["side"]))
    wanted = {(module, side) for module in adapter.modules for side in _SIDES}
    for layer in range(max(found, default=0) + 1):
        lacking = sorted(wanted - found.get(layer, set()))
        if lacking:
            raise ValueError(f"the adapter has no {lacking[0][0]}.lora_{lacking[0][1]} of layer {layer}")


def slot_checksums(
    name: str, tensors: Sequence[TensorInfo], data: Sequence[Buffer], checksum: Checksum
) -> Mapping[str, str]:
    """What must be reported of the slot of the adapter ``name`` that has these tensors: checksums by ``slot_name``."""
    places: dict[tuple[int, str, str], dict[int, Buffer]] = {}
    for info, each in zip(tensors, data, strict=True):
        match = _MATRIX.fullmatch(info.name)
        assert match is not None, "the tensors were not checked"
        module = "o_proj" if match["part"] == "o" else "qkv_proj"
        parts = places.setdefault((int(match["layer"]), module, match["side"]), {})
        parts["qkvo".index(match["part"])] = each
    return {slot_name(name, *place): checksum([parts[index] for index in sorted(parts)]) for place, parts in places.items()}

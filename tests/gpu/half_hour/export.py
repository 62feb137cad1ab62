"""How long training stops for an export: a layer copied to the host by tensor and by parameter, pageable and pinned."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable

import torch

from gspo.model.serving_layout import ServedParameter, ServedPart
from gspo_services.learner.weights.snapshot import Snapshot, build_snapshot
from gspo_services.learner.weights.weight_copy import copy_parameters, copy_weights

NUM_EXPERTS, HIDDEN, INNER = 128, 2048, 768


def weights() -> list[ServedParameter]:
    """One layer of Qwen3-30B-A3B: 384 experts' tensors in two parameters, and five more; 1.2 GB."""
    shapes = {"q": (4096, HIDDEN), "k": (512, HIDDEN), "v": (512, HIDDEN), "o": (HIDDEN, 4096), "router": (128, HIDDEN)}
    alone = [ServedParameter.alone(name, _random(math.prod(shape)).view(shape)) for name, shape in shapes.items()]
    size = INNER * HIDDEN
    halves = [ServedPart(f"{place}.gate_up", (INNER, HIDDEN), place * size) for place in range(2 * NUM_EXPERTS)]
    downs = [ServedPart(f"{place}.down", (HIDDEN, INNER), place * size) for place in range(NUM_EXPERTS)]
    fused = [ServedParameter(_random(len(parts) * size), parts) for parts in (halves, downs)]
    return [*alone, *fused]


def _random(num_elements: int) -> torch.Tensor:
    return torch.randn(num_elements, device="cuda", dtype=torch.bfloat16)


def _is_right(snapshot: Snapshot, tensors: dict[str, torch.Tensor]) -> bool:
    copied = zip(snapshot.manifest.tensors, snapshot.tensor_data(), strict=True)
    return all(
        bytes(data) == tensors[info.name].cpu().reshape(-1).view(torch.uint8).numpy().tobytes() for info, data in copied
    )


def main() -> None:
    parameters = weights()
    tensors = [pair for parameter in parameters for pair in parameter.tensors()]
    num_bytes = sum(tensor.nbytes for _, tensor in tensors)
    first_s, by_tensor_s, by_parameter_s = (
        _seconds(lambda: copy_parameters(parameters)),
        _seconds(lambda: copy_weights(tensors)),
        _seconds(lambda: copy_parameters(parameters)),
    )
    begin = time.monotonic()
    for _, tensor in tensors:
        tensor.to("cpu", copy=True)
    pageable_s = time.monotonic() - begin
    found = {
        "gb": round(num_bytes / 1e9, 2),
        "tensors": len(tensors),
        "parameters": len(parameters),
        "pageable_s": round(pageable_s, 3),
        "pageable_gb_per_s": round(num_bytes / pageable_s / 1e9, 2),
        "pinned_by_tensor_s": round(by_tensor_s, 3),
        "pinned_by_parameter_s": round(by_parameter_s, 3),
        "pinned_gb_per_s": round(num_bytes / by_parameter_s / 1e9, 2),
        "first_pinned_s": round(first_s, 3),
        "right": _is_right(build_snapshot(1, copy_parameters(parameters)), dict(tensors)),
    }
    print(json.dumps(found))


def _seconds(action: Callable[[], object]) -> float:
    begin = time.monotonic()
    action()
    return time.monotonic() - begin


if __name__ == "__main__":
    main()

"""How long training stops for an export: the tensors of a model copied to the host, as today and through pinned memory."""

from __future__ import annotations

import json
import time

import torch

from services.learner.weights.snapshot import copy_weights

NUM_EXPERTS, HIDDEN, INNER = 128, 2048, 768


def weights() -> list[tuple[str, torch.Tensor]]:
    """One layer of Qwen3-30B-A3B in the layout that is served: 384 experts' tensors and seven more, 1.2 GB."""
    shapes = {f"{expert}.{name}": (INNER, HIDDEN) for expert in range(NUM_EXPERTS) for name in ("gate", "up")}
    shapes |= {f"{expert}.down": (HIDDEN, INNER) for expert in range(NUM_EXPERTS)}
    shapes |= {"q": (4096, HIDDEN), "k": (512, HIDDEN), "v": (512, HIDDEN), "o": (HIDDEN, 4096), "router": (128, HIDDEN)}
    return [(name, torch.randn(shape, device="cuda", dtype=torch.bfloat16)) for name, shape in shapes.items()]


def main() -> None:
    tensors = weights()
    num_bytes = sum(tensor.nbytes for _, tensor in tensors)
    copy_weights(tensors)
    begin = time.monotonic()
    copy_weights(tensors)
    pageable_s = time.monotonic() - begin
    begin = time.monotonic()
    pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    pin_s = time.monotonic() - begin
    begin = time.monotonic()
    offset = 0
    for _, tensor in tensors:
        pinned[offset : offset + tensor.nbytes].copy_(tensor.reshape(-1).view(torch.uint8), non_blocking=True)
        offset += tensor.nbytes
    torch.cuda.synchronize()
    pinned_s = time.monotonic() - begin
    found = {
        "gb": round(num_bytes / 1e9, 2),
        "tensors": len(tensors),
        "pageable_s": round(pageable_s, 3),
        "pageable_gb_per_s": round(num_bytes / pageable_s / 1e9, 2),
        "pinned_s": round(pinned_s, 3),
        "pinned_gb_per_s": round(num_bytes / pinned_s / 1e9, 2),
        "pinning_s": round(pin_s, 3),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()

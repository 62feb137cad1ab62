"""SGLang's own hash of a parameter, on the device, against ours, which rollouts compute on the CPU."""

from __future__ import annotations

import json
import time

import torch
from sglang.kernels.ops.memory.gpu_tensor_hash import gpu_tensor_hash

from gspo_services.shared.weights.checksums import tiled_checksum
from tests.gpu.half_hour.device import seconds

TILE_BYTES = 4 * 8192
SIZES = [1, 2, 3, 4, 5, TILE_BYTES - 1, TILE_BYTES, TILE_BYTES + 1, 3 * TILE_BYTES + 2, 64 << 20, (805 << 20) + 3]


def main() -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)
    wrong = []
    for size in SIZES:
        data = torch.randint(0, 256, (size,), generator=generator, device="cuda", dtype=torch.uint8)
        begin = time.perf_counter()
        ours = tiled_checksum([data.cpu().numpy().data])
        host_s = time.perf_counter() - begin
        if f"{gpu_tensor_hash(data):016x}" != ours:
            wrong.append(size)
        changed = data.clone()
        changed[-1] ^= 1
        if f"{gpu_tensor_hash(changed):016x}" == ours:
            wrong.append(-size)
    words = data[:-3]
    device_s = seconds(lambda: gpu_tensor_hash(words))
    found = {
        "sizes": len(SIZES),
        "wrong": wrong,
        "device_gb_per_s": round(words.nbytes / device_s / 1e9),
        "host_mb_per_s": round(size / host_s / 1e6),
    }
    print(json.dumps(found))
    assert not wrong, found


if __name__ == "__main__":
    main()

"""The device and its two ceilings: how fast memory is copied and bfloat16 matrices are multiplied."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from statistics import median

import torch

PACKAGES = ("torch", "triton", "transformers", "deepspeed", "sglang", "sglang-kernel", "pyzmq")


def seconds(work: Callable[[], object], repetitions: int = 10) -> float:
    """Median seconds of the device for ``work``, after two calls that do not count."""
    times = []
    for repetition in range(repetitions + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        if repetition >= 2:
            times.append(begin.elapsed_time(end) / 1e3)
    return median(times)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main() -> None:
    properties = torch.cuda.get_device_properties(0)
    source = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / seconds(lambda: target.copy_(source))
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    multiplied = 2 * 8192**3 / seconds(lambda: matrix @ matrix)
    found = {
        "device": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "packages": {package: _version(package) for package in PACKAGES},
        "copy_tb_per_s": round(copied / 1e12, 2),
        "matmul_tflops": round(multiplied / 1e12),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()

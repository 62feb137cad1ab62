"""The CPU cost of attention in one decoding step: all requests in one call, compared with SGLang's loop over them.

python benchmarks/decode_attention.py
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import torch

import gspo_services.shared.sglang_cpu.launch  # noqa: F401  (placeholders where torchvision would be)
from gspo_services.shared.sglang_cpu.decode_backend import BatchedDecodeBackend

REPEATS = 15


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64, 128])
    parser.add_argument(
        "--longest", type=int, default=128, help="tokens; lengths are spread evenly from 1 (default: %(default)s)"
    )
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--groups", type=int, default=2, help="groups of heads that share keys (default: %(default)s)")
    parser.add_argument("--width", type=int, default=32, help="width of a head (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    print("| requests | loop, CPU ms a layer | one call | ratio |\n|---|---|---|---|")
    for num_requests in arguments.requests:
        loop, one = (
            cpu_ms(backend, num_requests, arguments.longest, arguments.heads, arguments.groups, arguments.width)
            for backend in (TorchNativeAttnBackend, BatchedDecodeBackend)
        )
        print(f"| {num_requests} | {loop:.2f} | {one:.2f} | {loop / one:.1f} |", flush=True)


def cpu_ms(backend: Any, num_requests: int, longest: int, num_heads: int, num_groups: int, width: int) -> float:
    """Return the median CPU milliseconds of attention in one layer and one step."""
    random = torch.Generator().manual_seed(0)
    num_slots = num_requests * longest
    keys, values = (torch.randn(num_slots, num_groups, width, generator=random) for _ in range(2))
    query = torch.randn(num_requests, num_heads, width, generator=random)
    table = torch.randperm(num_slots, generator=random).view(num_requests, longest).to(torch.int32)
    lengths = torch.randint(1, longest + 1, (num_requests,), generator=random)
    # Both need only the arguments of a server.
    attention = backend.__new__(backend)
    spent = []
    for _ in range(REPEATS):
        begin = time.process_time()
        attention._run_sdpa_forward_decode(
            query, torch.empty_like(query), keys, values, table, torch.arange(num_requests), lengths,
            None, width**-0.5, num_groups != num_heads, False, False, None,
        )  # fmt: skip
        spent.append(1e3 * (time.process_time() - begin))
    return median(spent)


if __name__ == "__main__":
    main()

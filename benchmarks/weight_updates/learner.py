"""What a version costs a rank of the learner: CPU seconds a GB of the version by stage, and memory beside its weights."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import torch

from benchmarks.weight_updates.versions import step
from gspo.model.serving_layout import ServedPart
from gspo_services.learner.weights import VersionLayout, VersionRange, WeightCopy, encode_changes
from gspo_services.learner.weights.copy_memory import CopyMemory
from gspo_services.learner.weights.weight_copy import copy_ranges

T = TypeVar("T")

SHARES: Final = (0.001, 0.01, 0.07, 0.36)
RANKS: Final = (1, 2, 4)
EXPERTS: Final = 32
ROWS, COLUMNS = 512, 1024
LAYER: Final = EXPERTS * ROWS * COLUMNS


def learner(sizes: Sequence[float]) -> list[dict[str, Any]]:
    """Return rows for models of these sizes in GB: one for each share of changed elements, and at 1 % one for each number of
    ranks. Measured on the third version: memory is used again by then.
    """
    cases = [(share, 1) for share in SHARES] + [(0.01, ranks) for ranks in RANKS[1:]]
    return [_measure(size, share, ranks) for size in sizes for share, ranks in cases]


def _measure(gigabytes: float, share: float, ranks: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    number = max(1, round(gigabytes * 1e9 / 2 / LAYER))
    weights = [torch.randn(LAYER, generator=generator).bfloat16() for _ in range(number)]
    layout = VersionLayout.of((part, "bfloat16") for layer in range(number) for part in _served(layer))
    memory, seconds, size = CopyMemory(), dict[str, float](), layout.num_bytes / 1e9
    newest: WeightCopy | None = None
    own = _memory("VmRSS")
    for version in range(1, 4):
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # The peak begins anew.
        copied = WeightCopy(layout, _timed(seconds, "copy", partial(copy_ranges, _first_rank(weights, ranks), memory)))
        _timed(seconds, "tile sums", copied.sums)
        if newest is not None and _timed(seconds, "compare, encode", partial(encode_changes, newest, copied)) is None:
            raise RuntimeError("the delta would not pay")
        newest, peak = copied, _memory("VmHWM") - own
        step(weights, share, seed=version)
    whole = weights[0].view(torch.uint8).numpy()
    total = sum(seconds.values())
    _timed(seconds, "memcpy of all", partial(_copy_often, np.zeros_like(whole), whole, number))
    row: dict[str, Any] = {"GB": round(size, 2), "changed": f"{share:.1%}", "ranks": ranks}
    row |= {name: round(each / size, 3) for name, each in seconds.items()}
    return row | {
        "a rank": round(total / size, 3),
        "a rank, of its part": round(total * ranks / size, 3),
        "peak memory, of its part": round(peak * ranks / layout.num_bytes, 2),
    }


def _served(layer: int) -> list[ServedPart]:
    prefix = f"model.layers.{layer}.mlp.experts."
    return [
        ServedPart(f"{prefix}{expert}.down_proj.weight", (ROWS, COLUMNS), expert * ROWS * COLUMNS)
        for expert in range(EXPERTS)
    ]


def _first_rank(weights: Sequence[torch.Tensor], ranks: int) -> Iterator[VersionRange]:
    """Of each parameter as much as one of ``ranks`` ranks has."""
    for layer, values in enumerate(weights):
        yield VersionRange(layer * values.nbytes, values[: len(values) // ranks])


def _copy_often(buffer: np.ndarray[Any, Any], whole: np.ndarray[Any, Any], times: int) -> None:
    for _ in range(times):
        np.copyto(buffer, whole)


def _memory(name: str) -> int:
    """Bytes of this process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def _timed(seconds: dict[str, float], name: str, act: Callable[[], T]) -> T:
    begin = time.process_time()
    result = act()
    seconds[name] = time.process_time() - begin
    return result

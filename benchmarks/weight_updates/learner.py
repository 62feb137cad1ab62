"""What a version costs the learner between the end of a step and its announcement: CPU seconds a GB, by stage."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
import torch

from benchmarks.weight_updates.versions import step
from gspo.model.serving_layout import ServedParameter, ServedPart
from gspo_services.learner.weights import build_snapshot, copy_parameters, encode_delta
from gspo_services.learner.weights.copy_memory import CopyMemory
from gspo_services.learner.weights.snapshot import Snapshot

T = TypeVar("T")

SHARES: Final = (0.001, 0.01, 0.07, 0.36)
EXPERTS: Final = 32
ROWS, COLUMNS = 512, 1024


def learner(gigabytes: float) -> list[dict[str, Any]]:
    """Return one row for each share of changed elements, measured on the third version: memory is used again by then."""
    return [_measure(gigabytes, share) for share in SHARES]


def _measure(gigabytes: float, share: float) -> dict[str, Any]:
    weights = [parameter.values for parameter in _parameters(gigabytes)]
    memory = CopyMemory()
    newest: Snapshot | None = None
    seconds: dict[str, float] = {}
    for version in range(1, 4):
        copied = _timed(seconds, "copy", partial(copy_parameters, _served(weights), memory))
        snapshot = _timed(seconds, "tile sums", partial(build_snapshot, version, copied))
        if newest is not None:
            _timed(seconds, "compare, encode", partial(encode_delta, newest, snapshot))
        newest = snapshot
        step(weights, share, seed=version)
    whole = weights[0].view(torch.uint8).numpy()
    buffer = np.zeros_like(whole)
    _timed(seconds, "memcpy", partial(_copy_often, buffer, whole, len(weights)))
    size = sum(each.nbytes for each in weights) / 1e9
    row: dict[str, Any] = {"changed": f"{share:.1%}", "GB": round(size, 2)}
    return row | {name: round(each / size, 3) for name, each in seconds.items()}


def _parameters(gigabytes: float) -> Iterator[ServedParameter]:
    generator = torch.Generator().manual_seed(0)
    size = EXPERTS * ROWS * COLUMNS
    for _ in range(max(1, round(gigabytes * 1e9 / 2 / size))):
        yield ServedParameter(torch.randn(size, generator=generator).bfloat16(), ())


def _served(weights: list[torch.Tensor]) -> Iterator[ServedParameter]:
    for layer, values in enumerate(weights):
        prefix = f"model.layers.{layer}.mlp.experts."
        yield ServedParameter(
            values,
            [
                ServedPart(f"{prefix}{expert}.down_proj.weight", (ROWS, COLUMNS), expert * ROWS * COLUMNS)
                for expert in range(EXPERTS)
            ],
        )


def _copy_often(buffer: np.ndarray[Any, Any], whole: np.ndarray[Any, Any], times: int) -> None:
    for _ in range(times):
        np.copyto(buffer, whole)


def _timed(seconds: dict[str, float], name: str, act: Callable[[], T]) -> T:
    begin = time.process_time()
    result = act()
    seconds[name] = time.process_time() - begin
    return result

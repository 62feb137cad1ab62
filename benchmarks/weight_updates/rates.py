"""Encoding and applying a delta, compared with memcpy, tile sums and zstd of the same bytes, on one core."""

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.weight_updates.versions import must, random_versions
from gspo_protocol.digests import tensor_digest
from gspo_services.learner.weights import encode_delta
from gspo_services.rollout.weights.replica import Replica
from gspo_services.shared.weights import compress
from tests.support.wire.replicas import hold

NUM_BYTES = 128 * 1024 * 1024


def rates() -> list[dict[str, Any]]:
    """Return one row for each operation, the best of a few runs."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        return _measure()
    finally:
        os.sched_setaffinity(0, cores)


def _measure() -> list[dict[str, Any]]:
    before, after = random_versions(NUM_BYTES, 2, 0.01)
    delta = must(encode_delta(before, after))
    payload = delta.data.tobytes()

    def applied() -> float:
        replica = Replica()
        hold(replica, before)
        return _best_of(1, lambda: replica.apply(delta.manifest, payload))

    was, now = (each.read(0, NUM_BYTES) for each in (before, after))
    buffer = np.empty_like(now)
    times = {
        "memcpy": _best_of(3, lambda: np.copyto(buffer, now)),
        "compare with the base": _best_of(3, lambda: np.count_nonzero(was.view("<u2") != now.view("<u2"))),
        "encode the delta": _best_of(3, lambda: encode_delta(before, after)),
        "apply it, changes checked": min(applied() for _ in range(3)),
        "sums of the version's tiles": _best_of(2, lambda: tensor_digest(now.data)),
        "zstd of the version": _best_of(1, lambda: compress(now.data)),
    }
    mebibytes = NUM_BYTES / 2**20
    return [{"what": what, "MiB/s of the version": round(mebibytes / seconds)} for what, seconds in times.items()]


def _best_of(runs: int, function: Callable[[], object]) -> float:
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return min(times)

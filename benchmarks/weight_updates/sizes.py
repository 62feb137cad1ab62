"""Bytes of each step's delta for a small Qwen3-MoE in bfloat16 with float32 master weights under AdamW."""

import statistics
from typing import Any

from benchmarks.weight_updates.versions import a_model, must, published, training
from gspo_protocol.codec import encode
from gspo_services.learner.weights import encode_delta

WARM, MEASURED = 20, 10


def sizes() -> list[dict[str, Any]]:
    """Return one row for each learning rate, over MEASURED steps after WARM."""
    return [_row(learning_rate) for learning_rate in (1e-6, 1e-5, 1e-4)]


def _row(learning_rate: float) -> dict[str, Any]:
    model = a_model()
    before = published(model, 1)
    changed, shares, absolute = [], [], []
    for step in training(model, learning_rate):
        after = published(model, step + 1)
        if step > WARM:
            delta = must(encode_delta(before, after))
            number = sum(bucket.num_changed for bucket in delta.manifest.buckets)
            wire = len(delta.data) + len(encode(delta.manifest)[0])
            changed.append(200 * number / after.manifest.num_bytes)
            shares.append(100 * wire / after.manifest.num_bytes)
            absolute.append(100 * sum(bucket.num_absolute for bucket in delta.manifest.buckets) / number)
        before = after
        if step == WARM + MEASURED:
            break
    return {
        "learning rate": f"{learning_rate:.0e}",
        "full bytes": before.manifest.num_bytes,
        "changed %": round(statistics.median(changed), 2),
        "further than 4 steps %": round(statistics.median(absolute), 1),
        "delta % of full": round(statistics.median(shares), 3),
        "largest %": round(max(shares), 3),
    }

"""What a version costs between the end of its training and its announcement, in its parts, without a run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from gspo_protocol.digests import sums_digest
from gspo_services.learner.weights.delta import encode_delta
from gspo_services.learner.weights.snapshot import Snapshot, build_snapshot
from gspo_services.learner.weights.weight_copy import copy_weights
from gspo_services.shared.torch_tiles import tile_sums

T = TypeVar("T")

LAYERS, EXPERTS, HIDDEN, INNER, VOCABULARY = 2, 128, 2048, 768, 151_936
CHANGED = 0.01
"""The share of the values that a step changes in bfloat16 at a usual learning rate."""


def main() -> None:
    weights = dict(_weights())
    _, first = _snapshot(1, weights)
    generator = torch.Generator(device="cuda").manual_seed(0)
    for tensor in weights.values():
        tensor.add_(torch.rand(tensor.shape, generator=generator, device="cuda").lt(CHANGED) * 0.1)
    copy_s, second = _snapshot(2, weights)
    found = {"gb": round(second.manifest.num_bytes / 1e9, 2), "snapshot_s": round(copy_s, 2)}
    found["delta_s"], _ = _timed(lambda: encode_delta(first, second))
    tensors = list(weights.values())
    found["device_sums_s"], _ = _timed(lambda: [tile_sums(tensor)[1] for tensor in tensors][-1].cpu())
    for (name, tensor), info in zip(weights.items(), second.manifest.tensors, strict=True):
        digest = sums_digest(tile_sums(tensor)[1].cpu().numpy().view("u8"), tensor.nbytes)
        assert (info.name, info.digest) == (name, digest)
    print(json.dumps(found))


def _weights() -> Iterator[tuple[str, torch.Tensor]]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    yield "model.embed_tokens.weight", random(VOCABULARY, HIDDEN)
    yield "lm_head.weight", random(VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}."
            yield f"{prefix}gate_proj.weight", random(INNER, HIDDEN)
            yield f"{prefix}up_proj.weight", random(INNER, HIDDEN)
            yield f"{prefix}down_proj.weight", random(HIDDEN, INNER)


def _snapshot(version: int, weights: dict[str, torch.Tensor]) -> tuple[float, Snapshot]:
    copy = copy_weights(weights.items())
    return _timed(lambda: build_snapshot(version, copy))


def _timed(act: Callable[[], T]) -> tuple[float, T]:
    begin = time.perf_counter()
    result = act()
    return round(time.perf_counter() - begin, 2), result


if __name__ == "__main__":
    main()

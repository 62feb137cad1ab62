"""Versions that are adapters, and the model below them."""

import threading

import numpy as np
import torch

from gspo.model.serving_layout import ServedParameter
from gspo_services.learner.weights.adapter_copy import AdapterCopy, PublishedBase, copy_adapter
from gspo_services.learner.weights.snapshot import build_snapshot
from gspo_services.learner.weights.weight_copy import copy_weights
from gspo_services.shared.weights import xxh3_checksum

PROBE = ([3, 1, 4], [-0.5, -1.0])


def a_base(value: float = 1.0) -> PublishedBase:
    return PublishedBase(copy_weights({"model.norm.weight": torch.full((4,), value), "b": torch.zeros(2)}.items()))


def copied(base: PublishedBase, alpha: float = 4.0) -> AdapterCopy:
    tensors = {"a.lora_A.weight": torch.ones(2, 3), "a.lora_B.weight": torch.zeros(5, 2)}
    matrices = [ServedParameter.alone(name, tensor) for name, tensor in tensors.items()]
    return copy_adapter(matrices, rank=2, alpha=alpha, base=base, probe=PROBE)


def test_a_version_has_the_matrices_alone_and_says_what_they_belong_to() -> None:
    base = a_base()
    manifest = build_snapshot(3, copied(base)).manifest
    assert [(info.name, info.shape) for info in manifest.tensors] == [
        ("a.lora_A.weight", [2, 3]),
        ("a.lora_B.weight", [5, 2]),
    ]
    assert manifest.num_bytes == 4 * (6 + 10)
    assert manifest.adapter is not None
    assert (manifest.adapter.rank, manifest.adapter.alpha, manifest.adapter.base_digest) == (2, 4.0, base.digest)
    assert (manifest.adapter.probe_ids, manifest.adapter.probe_logprobs) == PROBE


def test_the_same_matrices_are_another_version_above_another_model_or_with_another_scale() -> None:
    digests = [copied(a_base()).digest(), copied(a_base(2.0)).digest(), copied(a_base(), alpha=8.0).digest()]
    assert len(set(digests)) == 3
    assert copied(a_base()).digest() == digests[0] == build_snapshot(9, copied(a_base())).manifest.digest


def test_what_an_engine_reports_of_the_model_below_is_computed_once() -> None:
    base = a_base()
    expected = {"model.norm.weight": xxh3_checksum([np.ones(4, np.float32).tobytes()]), "b": xxh3_checksum([bytes(8)])}
    assert base.checksums("xxh3") in ({}, expected)
    assert base._found["xxh3"].result(60) == expected
    assert base.checksums("xxh3") == expected


def test_whoever_asks_does_not_wait_for_the_hashing_of_a_model() -> None:
    base, go = a_base(), threading.Event()
    compute = base._compute
    base._compute = lambda name: (go.wait(60), compute(name))[1]  # type: ignore[method-assign]
    assert base.checksums("cpu") == {}
    assert base.checksums("cpu") == {}
    go.set()
    assert len(base._found["cpu"].result(60)) == 2
    assert len(base.checksums("cpu")) == 2

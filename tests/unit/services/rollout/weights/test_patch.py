"""The changes since the engine loaded a version, at their places in the engine's own parameters."""

from pathlib import Path

import numpy as np
import pytest
import torch

from gspo_services.learner.weights.snapshot import Snapshot
from gspo_services.rollout.weights.patch import NoPatchError, Touched, write_patch
from gspo_services.rollout.weights.replica import PATCH_SHARE, Replica
from gspo_services.shared.sglang_patching import patch_parameters
from gspo_services.shared.weights import Spread, merge, shards
from tests.support.engines.cut_by_torch import random_weights, rank_weights
from tests.support.wire.deltas import a_delta, apply
from tests.support.wire.replicas import hold
from tests.support.wire.snapshots import snapshot_of

LAYER = "model.layers.0"
SHAPES = {
    "model.embed_tokens.weight": (70, 16),
    **{f"{LAYER}.self_attn.{part}_proj.weight": (32 if part == "q" else 8, 16) for part in "vqk"},
    **{f"{LAYER}.mlp.experts.{e}.{part}_proj.weight": (6, 16) for e in range(11) for part in ("up", "gate", "down")},
    f"{LAYER}.input_layernorm.weight": (16,),
    "model.layers.1.mlp.experts.gate_up_proj": (3, 8, 10),
}
Weights = dict[str, torch.Tensor]


def weights(dtype: torch.dtype) -> Weights:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def stepped(before: Weights, seed: int, share: float = 0.01) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    after = {name: tensor.clone() for name, tensor in before.items()}
    for tensor in after.values():
        chosen = torch.randint(0, tensor.numel(), (max(1, int(share * tensor.numel())),), generator=generator)
        tensor.view(-1)[chosen] += torch.randn(len(chosen), generator=generator).to(tensor.dtype)
    return after


def engine_of(snapshot: Snapshot, dtype: torch.dtype) -> Weights:
    """The parameters of an engine that loads all of a version."""
    merged = merge(zip(snapshot.manifest.tensors, snapshot.tensor_data(), strict=True))
    return {name: torch.frombuffer(bytearray(b"".join(each.parts)), dtype=dtype) for name, each in merged.items()}


def bits(engine: Weights) -> dict[str, bytes]:
    return {name: tensor.view(-1).view(torch.uint8).numpy().tobytes() for name, tensor in engine.items()}


def patch(replica: Replica, directory: Path, known: Weights) -> int:
    assert replica.touched is not None
    tensors = replica.current.tensors
    return write_patch(directory, replica.files, tensors, replica.touched, known, shards(tensors, Spread(), 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_hundred_patches_give_the_engine_the_bits_of_a_full_load(dtype: torch.dtype, tmp_path: Path) -> None:
    now = weights(dtype)
    newest = snapshot_of(1, now.items())
    replica = hold(Replica(shard_bytes=500), newest)
    replica.was_loaded()
    engine = engine_of(newest, dtype)
    for version in range(2, 102):
        now = stepped(now, version)
        base, newest = newest, snapshot_of(version, now.items())
        apply(replica, a_delta(base, newest))
        # Some versions reach the engine together.
        if version % 5:
            num_bytes = patch(replica, tmp_path, engine)
            assert patch_parameters(engine, tmp_path) > 0
            assert bits(engine) == bits(engine_of(newest, dtype))
            assert num_bytes < 0.2 * newest.manifest.num_bytes + 5000
            replica.was_loaded()


def test_changes_that_nearly_all_elements_have_are_no_patch() -> None:
    before = {"w": torch.zeros(1000, dtype=torch.bfloat16)}
    first = snapshot_of(1, before.items())
    replica = hold(Replica(), first)
    replica.was_loaded()
    most = int(PATCH_SHARE * 1000)
    second = snapshot_of(2, {"w": torch.cat([torch.ones(most), torch.zeros(1000 - most)]).to(torch.bfloat16)}.items())
    apply(replica, a_delta(first, second))
    assert replica.touched is not None
    third = snapshot_of(3, {"w": torch.cat([torch.ones(most + 1), torch.zeros(999 - most)]).to(torch.bfloat16)}.items())
    apply(replica, a_delta(second, third))
    assert replica.touched is None
    replica.was_loaded()
    assert replica.touched == []


def test_what_the_engine_does_not_have_is_no_patch_but_for_a_tied_head(tmp_path: Path) -> None:
    before = {name: torch.zeros(64, 2) for name in ("model.embed_tokens.weight", "lm_head.weight", "a.mlp.up_proj.weight")}
    snapshot = snapshot_of(1, before.items())
    replica = hold(Replica(), snapshot)

    def touched(tensor: int) -> list[Touched]:
        offset = snapshot.manifest.tensors[tensor].offset
        return [Touched(offset=offset, item_bytes=4, places=np.array([5], np.uint32))]

    tensors = snapshot.manifest.tensors
    ranks = shards(tensors, Spread(), 1)
    known = ["model.embed_tokens.weight", "a.mlp.gate_up_proj.weight"]
    for tensor in (0, 1):
        write_patch(tmp_path, replica.files, tensors, touched(tensor), known, ranks)
    with pytest.raises(NoPatchError, match="up_proj"):
        write_patch(tmp_path, replica.files, tensors, touched(2), known, ranks)
    with pytest.raises(NoPatchError, match="embed_tokens"):
        write_patch(tmp_path, replica.files, tensors, touched(0), [], ranks)


@pytest.mark.parametrize(("tensor", "expert"), [(2, 1), (4, 2)])
def test_each_rank_patches_its_own_shard(tensor: int, expert: int, tmp_path: Path) -> None:
    """Rows, columns, experts, shared heads of keys and padding: what torch cuts from the version, after ten patches."""
    now = random_weights(experts=4)
    newest = snapshot_of(1, now.items())
    replica = hold(Replica(shard_bytes=500), newest)
    replica.was_loaded()
    ranks = [rank_weights(now, rank, tensor=tensor, expert=expert) for rank in range(tensor)]
    for version in range(2, 12):
        now = stepped(now, version)
        base, newest = newest, snapshot_of(version, now.items())
        apply(replica, a_delta(base, newest))
        tensors, touched = replica.current.tensors, replica.touched
        assert touched
        cut = shards(tensors, Spread(tensor=tensor, expert=expert), 2)
        write_patch(tmp_path, replica.files, tensors, touched, ranks[0], cut)
        for rank, own in enumerate(ranks):
            patch_parameters(own, tmp_path, rank)
            assert bits(own) == bits(rank_weights(now, rank, tensor=tensor, expert=expert))
        replica.was_loaded()

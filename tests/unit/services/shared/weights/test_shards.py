"""The shards of each rank, against torch's own slices of the same tensors."""

from typing import Any, Final

import pytest
import torch

from gspo_services.shared.weights import Hash, ShardBytes, ShardChecksums, Spread, SpreadError, hash_function, shards
from tests.support.engines.cut_by_torch import Weights, bits, random_weights, rank_weights
from tests.support.wire.snapshots import snapshot_of

SHAPES: Final[dict[str, dict[str, Any]]] = {
    "llama": {"biases": True},
    "llama, one head of keys": {"biases": True, "kv_heads": 1},
    "qwen3": {"kv_heads": 4},
    "qwen3-moe": {"experts": 12},
}
LAYER: Final = "model.layers.0"


def sent(weights: Weights) -> list[Any]:
    snapshot = snapshot_of(1, weights.items())
    return list(zip(snapshot.manifest.tensors, snapshot.tensor_data(), strict=True))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_each_rank_has_what_torch_cuts_for_it(shape: str, tensor: int) -> None:
    options = SHAPES[shape]
    weights, kv_heads = random_weights(**options), options.get("kv_heads", 2)
    for expert in (1, 2, 4) if options.get("experts") and tensor == 4 else (1,):
        tensors = sent(weights)
        found = shards([info for info, _ in tensors], Spread(tensor=tensor, expert=expert), kv_heads)
        assert len(found) == tensor
        for rank, own in enumerate(found):
            true = rank_weights(weights, rank, tensor=tensor, expert=expert, kv_heads=kv_heads)
            assert set(own) == set(true)
            for name, shard in own.items():
                pieces = ShardBytes(shard, [data for _, data in tensors])
                assert b"".join(pieces) == bits(true[name]), (rank, name)
                assert shard.num_bytes == len(bits(true[name]))
                assert list(pieces[1:]) == [pieces[at] for at in range(1, len(pieces))]


@pytest.mark.parametrize("name", ["cpu", "cuda", "xxh3"])
def test_the_checksums_of_shards_are_those_of_their_bytes(name: Hash) -> None:
    weights, spread = random_weights(experts=4), Spread(tensor=2, expert=2)
    found = ShardChecksums().of(sent(weights), spread, 2, name)
    for rank, checksums in enumerate(found):
        true = rank_weights(weights, rank, tensor=2, expert=2)
        assert checksums == {parameter: hash_function(name)([bits(each)]) for parameter, each in true.items()}


def test_only_shards_with_a_changed_tensor_are_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, spread = random_weights(experts=4), Spread(tensor=2, expert=2)
    known = ShardChecksums()
    before = known.of(sent(weights), spread, 2, "xxh3")
    hashed: list[str] = []
    monkeypatch.setattr(ShardBytes, "__init__", _noting(hashed, ShardBytes.__init__))
    changed = f"{LAYER}.mlp.experts.3.down_proj.weight"
    weights[changed] = weights[changed] + 1
    after = known.of(sent(weights), spread, 2, "xxh3")
    assert hashed == [f"{LAYER}.mlp.experts.w2_weight"], "expert 3 is rank 1's alone"
    assert after[0] == before[0]
    assert after[1] == ShardChecksums().of(sent(weights), spread, 2, "xxh3")[1] != before[1]
    known.of(sent(weights), spread, 2, "cpu")
    assert len(hashed) > 20, "another hash is another checksum"
    hashed.clear()
    known.of(sent(weights), Spread(tensor=2), 2, "cpu")
    assert len(hashed) > 20, "so is another server"


def _noting(hashed: list[str], init: Any) -> Any:
    def noted(self: ShardBytes, shard: Any, data: Any) -> None:
        hashed.append(shard.name)
        init(self, shard, data)

    return noted


def test_a_parameter_that_nobody_knows_how_to_cut_is_refused_on_several_ranks_only() -> None:
    weights = {**random_weights(), f"{LAYER}.mixer.in_proj.weight": torch.zeros(8, 8)}
    infos = [info for info, _ in sent(weights)]
    assert len(shards(infos, Spread(data=2), 2)) == 1
    with pytest.raises(SpreadError, match=r"mixer\.in_proj\.weight.*rollout\.tensor_parallel = 1"):
        shards(infos, Spread(tensor=2), 2)


def test_what_does_not_divide_is_refused() -> None:
    infos = [info for info, _ in sent(random_weights())]
    with pytest.raises(SpreadError, match="which 3 ranks do not divide"):
        shards(infos, Spread(tensor=3), 2)


def test_a_parameter_of_which_a_part_was_not_sent_has_no_shard() -> None:
    weights = random_weights(experts=4)
    del weights[f"{LAYER}.mlp.experts.1.up_proj.weight"]
    [own, _] = shards([info for info, _ in sent(weights)], Spread(tensor=2), 2)
    assert f"{LAYER}.mlp.experts.w13_weight" not in own
    assert f"{LAYER}.mlp.experts.w2_weight" in own

"""What ranks sum of their parameters, compared with the digests of the version: every shape that a server may have."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch

from gspo_protocol.messages import TensorInfo
from gspo_services.rollout.sglang import RankSums
from gspo_services.rollout.weights.sums import Summed, compare_sums
from gspo_services.rollout.weights.verification import Verification
from gspo_services.shared.sglang_sums import is_derived, sum_parameters
from gspo_services.shared.weights import Spread, shards, sums_file
from tests.support.engines.cut_by_torch import Weights, random_weights, rank_weights
from tests.support.wire.snapshots import snapshot_of

LAYER: Final = "model.layers.0"
SPREADS: Final = [Spread(), Spread(tensor=2), Spread(tensor=4), Spread(tensor=2, expert=2), Spread(tensor=4, expert=2)]


def sent_of(weights: Weights) -> list[tuple[TensorInfo, Any]]:
    snapshot = snapshot_of(1, weights.items())
    return list(zip(snapshot.manifest.tensors, snapshot.tensor_data(), strict=True))


def ranks_of(weights: Weights, spread: Spread) -> list[Weights]:
    made = [rank_weights(weights, rank, tensor=spread.tensor, expert=spread.expert) for rank in range(spread.tensor)]
    return [{name: tensor.clone() for name, tensor in each.items()} for each in made]


class Server:
    """Ranks with these parameters."""

    def __init__(self, directory: Path, weights: Weights, spread: Spread) -> None:
        self._directory = directory
        sent = sent_of(weights)
        self.expected = Summed(sent=sent, shards=shards([info for info, _ in sent], spread, 2))
        self.ranks = ranks_of(weights, spread)

    def report(self) -> list[RankSums]:
        self.expected.write_places(self._directory)
        found: list[RankSums] = []
        for rank, parameters in enumerate(self.ranks):
            sizes, others = sum_parameters(parameters, self._directory, rank)
            sums = np.frombuffer((self._directory / sums_file(rank)).read_bytes(), dtype="<u8")
            found.append(RankSums(sizes=sizes, sums=sums, others=others))
        return found

    def compare(self, *former: Any) -> Verification:
        return compare_sums(self.expected, self.report(), *former)


@pytest.mark.parametrize("spread", SPREADS, ids=str)
@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_ranks_with_the_version_add_up_to_it_and_a_flipped_bit_anywhere_is_named(
    tmp_path: Path, spread: Spread, experts: int, dtype: torch.dtype
) -> None:
    weights = random_weights(experts=experts, dtype=dtype)
    server = Server(tmp_path, weights, spread)
    assert server.compare() == Verification()
    generator = torch.Generator().manual_seed(1)
    for rank, parameters in enumerate(server.ranks):
        for name, tensor in parameters.items():
            bits = tensor.view(-1).view(torch.uint8)
            place = int(torch.randint(len(bits), (1,), generator=generator))
            bits[place] ^= 64
            label = name if spread.is_whole else f"rank {rank}: {name}"
            assert server.compare().mismatched == [label], f"byte {place}"
            bits[place] ^= 64
    assert server.compare().ok


def test_stacked_experts_are_summed_as_they_were_sent(tmp_path: Path) -> None:
    stack = torch.randn(3, 40, 500, generator=torch.Generator().manual_seed(0))
    name = "model.layers.0.mlp.experts.w13_weight"
    sent = sent_of({"model.layers.0.mlp.experts.gate_up_proj": stack})
    expected = Summed(sent=sent, shards=shards([info for info, _ in sent], Spread(), 2))
    expected.write_places(tmp_path)
    live = {name: stack.transpose(1, 2).contiguous()}
    for changed in (0.0, 1.0):
        live[name][1, 7, 3] += changed
        sizes, _ = sum_parameters(live, tmp_path)
        sums = np.frombuffer((tmp_path / sums_file(0)).read_bytes(), dtype="<u8")
        assert compare_sums(expected, [RankSums(sizes=sizes, sums=sums)]).mismatched == [name] * bool(changed)


def test_a_scale_made_from_another_is_left_out_while_it_is_right() -> None:
    weight = torch.randn(8).to(torch.bfloat16)
    state = {"norm.weight": weight, "norm.gemma_weight": weight + 1.0, "other.gemma_weight": weight}
    assert [name for name in state if is_derived(name, state)] == ["norm.gemma_weight"]
    weight += 1.0
    assert not any(is_derived(name, state) for name in state)


def test_tensors_of_many_tiles_and_hundreds_of_experts_are_summed_at_once(tmp_path: Path) -> None:
    """Experts whose tensors end with a tile, and rows that are wider than what is widened at a time."""
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    experts = f"{LAYER}.mlp.experts"
    weights = random_weights(experts=6)
    weights |= {f"{experts}.{each}.{part}_proj.weight": some(64, 512) for each in range(6) for part in ("gate", "up")}
    weights |= {f"{experts}.{each}.down_proj.weight": some(512, 64) for each in range(6)}
    weights[f"{LAYER}.self_attn.o_proj.weight"] = some(6, 300_000)
    for spread in (Spread(), Spread(tensor=2)):
        server = Server(tmp_path, weights, spread)
        assert server.compare() == Verification()
        server.ranks[-1][f"{experts}.w2_weight"][3, 100, 5] += 1
        server.ranks[-1][f"{LAYER}.self_attn.o_proj.weight"][5, 7] += 1
        assert len(server.compare().mismatched) == 2


def test_what_each_rank_has_instead_is_named(tmp_path: Path) -> None:
    spread = Spread(tensor=2)
    before, after = random_weights(experts=4, seed=1), random_weights(experts=4, seed=2)
    first = Server(tmp_path, before, spread)
    former = (first.expected.shards, first.report())
    server = Server(tmp_path, after, spread)
    o_proj, qkv = f"{LAYER}.self_attn.o_proj.weight", f"{LAYER}.self_attn.qkv_proj.weight"
    server.ranks[1][o_proj] = first.ranks[1][o_proj]
    server.ranks[0][qkv], server.ranks[1][qkv] = server.ranks[1][qkv], server.ranks[0][qkv]
    assert server.compare(former).mismatched == [
        f"rank 0: {qkv} (it has the shard of rank 1)",
        f"rank 1: {o_proj} (it has the shard of the version before)",
        f"rank 1: {qkv} (it has the shard of rank 0)",
    ]
    norm = server.ranks[0]["model.norm.weight"] = server.ranks[0]["model.norm.weight"].clone()
    norm[3] += 1
    assert "rank 0: model.norm.weight" in server.compare(former).mismatched


def test_a_parameter_that_is_absent_unknown_or_of_another_size_is_named(tmp_path: Path) -> None:
    server = Server(tmp_path, random_weights(), Spread())
    (own,) = server.ranks
    own["model.extra.weight"] = torch.zeros(3)
    del own["model.norm.weight"]
    own["model.embed_tokens.weight"] = own["model.embed_tokens.weight"][:-1]
    found = server.compare()
    assert (found.mismatched, found.missing, found.unsent) == (
        ["model.embed_tokens.weight"], ["model.norm.weight"], ["model.extra.weight"]
    )  # fmt: skip


def test_what_is_not_placed_has_a_digest_that_a_flipped_bit_changes(tmp_path: Path) -> None:
    server = Server(tmp_path, random_weights(), Spread())
    tower = server.ranks[0]["vision_tower.weight"] = torch.zeros(20_000, dtype=torch.bfloat16)
    first = server.report()[0].others
    assert set(first) == {"vision_tower.weight"}
    assert server.report()[0].others == first
    tower[19_999] = 1
    assert server.report()[0].others != first


def test_padding_that_is_not_zero_is_named(tmp_path: Path) -> None:
    server = Server(tmp_path, random_weights(), Spread())
    server.ranks[0]["lm_head.weight"][-1, 5] = 1
    assert server.compare().mismatched == ["lm_head.weight"]


def test_a_head_that_is_the_embedding_may_be_absent_and_no_other(tmp_path: Path) -> None:
    weights = random_weights()
    server = Server(tmp_path, weights, Spread())
    del server.ranks[0]["lm_head.weight"]
    assert server.compare().missing == ["lm_head.weight"]
    tied = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
    server = Server(tmp_path, tied, Spread())
    del server.ranks[0]["lm_head.weight"]
    assert server.compare().ok


@pytest.mark.parametrize("spread", [Spread(), Spread(tensor=2)], ids=str)
def test_a_copy_that_is_no_longer_the_version_does_not_pass(tmp_path: Path, spread: Spread) -> None:
    """The engine has what this rollout's files have, and both differ from the learner's digest."""
    weights = random_weights()
    server = Server(tmp_path, weights, spread)
    changed = {**weights, "model.norm.weight": weights["model.norm.weight"] + 1}
    sent = [(info, data) for (info, _), (_, data) in zip(server.expected.sent, sent_of(changed), strict=True)]
    server.expected = Summed(sent=sent, shards=server.expected.shards)
    server.ranks = ranks_of(changed, spread)
    assert server.compare().mismatched == ["model.norm.weight"]


def test_parts_of_a_parameter_are_unverified_where_another_part_was_not_sent(tmp_path: Path) -> None:
    weights = random_weights()
    name = f"{LAYER}.self_attn.qkv_proj.weight"
    server = Server(tmp_path, weights, Spread())
    sent = sent_of({key: each for key, each in weights.items() if not key.endswith("k_proj.weight")})
    server.expected = Summed(sent=sent, shards=shards([info for info, _ in sent], Spread(), 2))
    found = server.compare()
    assert (found.ok, sorted(found.unverified)) == (True, [f"{LAYER}.self_attn.{part}_proj.weight" for part in "qv"])
    assert name not in server.expected.shards[0]

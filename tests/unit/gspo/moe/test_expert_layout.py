"""One layer's experts under the names of three layouts."""

from itertools import pairwise

import pytest
import torch

from gspo.moe.expert_layout import Piece, checkpoint_tensors, pieces, stretches

LAYER = "model.layers.3.mlp"


def test_a_fused_slab_and_the_slabs_of_autoep_consist_of_the_same_pieces() -> None:
    fused = torch.arange(4 * 6 * 5).reshape(4, 6, 5)
    gate, up = pieces(f"{LAYER}.experts.gate_up_proj", fused.shape)
    assert (gate.name, up.name) == (f"{LAYER}.experts.gate_proj", f"{LAYER}.experts.up_proj")
    assert gate.shape(fused.shape) == up.shape(fused.shape) == (4, 3, 5)
    assert torch.equal(gate.of(fused), fused[:, :3])
    assert torch.equal(torch.cat([gate.of(fused), up.of(fused)], dim=1), fused)
    assert pieces(f"{LAYER}.experts.w1", (2, 3, 5)) == [Piece(gate.name)]
    assert pieces(f"{LAYER}.experts.w3", (2, 3, 5)) == [Piece(up.name)]
    down = pieces(f"{LAYER}.experts.down_proj", (4, 5, 3))
    assert pieces(f"{LAYER}.experts.w2", (2, 5, 3)) == down == [Piece(f"{LAYER}.experts.down_proj")]


def numbered(name: str, shape: tuple[int, ...], bounds: list[int], first_row: int = 0) -> list[tuple[str, int]]:
    """The piece and the place of each element of a parameter that is cut at ``bounds``."""
    found = []
    for start, end in pairwise(bounds):
        told = [(each.piece, each.first + place) for each in stretches(name, shape, start, end - start, first_row=first_row)
                for place in range(each.end - each.begin)]  # fmt: skip
        assert len(told) == end - start
        found += told
    return found


@pytest.mark.parametrize("bounds", [[0, 120], [0, 1, 16, 17, 29, 30, 31, 44, 45, 60, 75, 119, 120], [0, 120, 120]])
def test_each_weight_of_an_expert_has_one_place_in_every_layout(bounds: list[int]) -> None:
    shape = (4, 6, 5)
    fused = numbered(f"{LAYER}.experts.gate_up_proj", shape, bounds)
    halves = {}
    for slab in ("w1", "w3"):
        ranks = [numbered(f"{LAYER}.experts.{slab}", (2, 3, 5), [0, 7, 30], first_row=row) for row in (0, 2)]
        halves[slab] = torch.arange(60).view(4, 3, 5), [*ranks[0], *ranks[1]]
    whole = [[halves[slab][1][place] for place in halves[slab][0][expert].flatten().tolist()]
             for expert in range(4) for slab in ("w1", "w3")]  # fmt: skip
    assert fused == [each for part in whole for each in part]
    assert len({*fused}) == 120


def test_the_router_has_one_name_and_other_parameters_keep_theirs() -> None:
    assert (
        pieces(f"{LAYER}.router.gate.weight", (4, 5))
        == pieces(f"{LAYER}.gate.weight", (4, 5))
        == [Piece(f"{LAYER}.gate.weight")]
    )
    assert pieces("model.norm.weight", (5,)) == [Piece("model.norm.weight")]
    assert pieces("model.norm.weight", (5,))[0].shape((5,)) == (5,)


@pytest.mark.parametrize(("slab", "projection"), [("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")])
def test_the_experts_of_a_whole_slab_are_a_checkpoints_tensors(slab: str, projection: str) -> None:
    whole = torch.arange(3 * 2 * 2).reshape(3, 2, 2)
    found = dict(checkpoint_tensors(f"{LAYER}.experts.{slab}", whole) or ())
    assert list(found) == [f"{LAYER}.experts.{expert}.{projection}.weight" for expert in range(3)]
    assert torch.equal(found[f"{LAYER}.experts.2.{projection}.weight"], whole[2])


def test_transformers_own_names_are_left_to_transformers() -> None:
    assert checkpoint_tensors(f"{LAYER}.experts.gate_up_proj", torch.zeros(2, 2, 2)) is None
    assert checkpoint_tensors(f"{LAYER}.gate.weight", torch.zeros(2, 2)) is None
    assert dict(checkpoint_tensors(f"{LAYER}.router.gate.weight", torch.ones(2, 2)) or ()).keys() == {f"{LAYER}.gate.weight"}

"""One layer's experts under the names of three layouts."""

from itertools import pairwise

import pytest
import torch

from gspo.moe.expert_layout import Piece, Slab, pieces, slab_of, stretches, whole_of

LAYER = "model.layers.3.mlp"


@pytest.mark.parametrize("layer", [LAYER, "model.layers.3.block_sparse_moe"])
def test_a_fused_slab_and_the_slabs_of_autoep_consist_of_the_same_pieces(layer: str) -> None:
    fused = torch.arange(4 * 6 * 5).reshape(4, 6, 5)
    gate, up = pieces(f"{layer}.experts.gate_up_proj", fused.shape)
    assert (gate.name, up.name) == (f"{layer}.experts.gate_proj", f"{layer}.experts.up_proj")
    assert gate.shape(fused.shape) == up.shape(fused.shape) == (4, 3, 5)
    assert torch.equal(gate.of(fused), fused[:, :3])
    assert torch.equal(torch.cat([gate.of(fused), up.of(fused)], dim=1), fused)
    assert pieces(f"{layer}.experts.w1", (2, 3, 5)) == [Piece(gate.name)]
    assert pieces(f"{layer}.experts.w3", (2, 3, 5)) == [Piece(up.name)]
    down = pieces(f"{layer}.experts.down_proj", (4, 5, 3))
    assert pieces(f"{layer}.experts.w2", (2, 5, 3)) == down == [Piece(f"{layer}.experts.down_proj")]


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


def test_other_parameters_keep_their_names() -> None:
    assert pieces(f"{LAYER}.gate.weight", (4, 5)) == [Piece(f"{LAYER}.gate.weight")]
    assert pieces("model.norm.weight", (5,)) == [Piece("model.norm.weight")]
    assert pieces("model.norm.weight", (5,))[0].shape((5,)) == (5,)


@pytest.mark.parametrize(
    ("slab", "fused", "first"), [("w1", "gate_up_proj", 0), ("w3", "gate_up_proj", 2), ("w2", "down_proj", 0)]
)
def test_a_slab_is_some_rows_of_what_transformers_stacks(slab: str, fused: str, first: int) -> None:
    found = slab_of(f"{LAYER}.experts.{slab}", (3, 2, 5))
    assert found == Slab(f"{LAYER}.experts.{fused}", first, 2, 2 if slab == "w2" else 4)


def test_transformers_own_names_are_left_to_transformers() -> None:
    assert slab_of(f"{LAYER}.experts.gate_up_proj", (2, 2, 2)) is None
    assert slab_of(f"{LAYER}.gate.weight", (2, 2)) is None
    assert whole_of(f"{LAYER}.experts.gate_up_proj") is whole_of(f"{LAYER}.experts.0.w1.weight") is None


def test_gate_and_up_are_side_by_side_in_one_parameter_of_transformers() -> None:
    both = (f"{LAYER}.experts.gate_up_proj", [f"{LAYER}.experts.w1", f"{LAYER}.experts.w3"])
    assert whole_of(f"{LAYER}.experts.w1") == whole_of(f"{LAYER}.experts.w3") == both
    assert whole_of(f"{LAYER}.experts.w2") == (f"{LAYER}.experts.down_proj", [f"{LAYER}.experts.w2"])

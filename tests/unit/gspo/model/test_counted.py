"""What the counter of a step's bytes counts, by hand."""

import torch
from torch import nn

from tests.support.paper.counted import Amount, Counted, place_of

T, H, I = 8, 16, 4  # noqa: E741  # tokens, hidden, intermediate


def test_bytes_and_operations_of_a_layer_are_those_of_its_kernels() -> None:
    model = nn.ModuleDict({"mlp": nn.Linear(H, I, bias=False)})
    hidden_TH = torch.ones(T, H, requires_grad=True)
    with Counted() as counted:
        with counted.phase("forward"):
            out = model["mlp"](hidden_TH)
        total = out.sum()
        with counted.phase("backward"):
            total.backward()
    forward = Amount.sum(each for (_, phase), each in counted.amounts.items() if phase == "forward")
    assert (forward.read, forward.written, forward.operations, forward.kernels) == (
        4 * (T * H + H * I), 4 * T * I, 2 * T * H * I, 1
    )  # fmt: skip
    backward = Amount.sum(each for (_, phase), each in counted.amounts.items() if phase == "backward")
    # The gradient of the sum is one number, expanded: it lies in memory once.
    assert (backward.read, backward.written) == (4 * (1 + T * H) + 4 * (1 + H * I), 4 * (1 + I * H + T * H))
    assert backward.operations == 2 * forward.operations


def test_rows_that_are_picked_or_put_do_not_read_the_whole_table() -> None:
    table, ids = torch.zeros(1000, H), torch.tensor([3, 5])
    with Counted() as counted, counted.phase("forward"):
        found = table.index_select(0, ids)
        table.index_add_(0, ids, found)
    (amount,) = counted.amounts.values()
    assert (amount.read, amount.written) == (4 * 2 * H + 16 + 4 * 2 * H + 16 + 4 * 2 * H, 2 * 4 * 2 * H)


def test_places_are_those_of_the_innermost_part_that_has_a_name() -> None:
    names = ["model.layers.3.mlp", "model.layers.3.mlp.experts", "model.layers.3.mlp.gate", "model.layers.3"]
    assert place_of(names) == "router"
    assert place_of(names[:2]) == "experts"
    assert place_of(["model.layers.0.self_attn.q_norm", "model.layers.0.self_attn"]) == "attention"
    assert place_of(["model.layers.0.input_layernorm"]) == "norms"
    assert place_of(["lm_head"]) == "head"
    assert place_of(["model"]) == "loss and sums"


def test_what_a_result_is_put_into_is_written_alone_and_read_where_it_is_added_to() -> None:
    a, b, sums = torch.ones(T, H), torch.ones(H, I), torch.ones(T, I)
    with Counted() as counted, counted.phase("forward"):
        torch.mm(a, b, out=sums)
        sums.addmm_(a, b, beta=0)
        torch.addmm(sums, a, b, out=sums)
    (found,) = counted.amounts.values()
    assert (found.read, found.written) == (4 * (3 * (T * H + H * I) + T * I), 3 * 4 * T * I)

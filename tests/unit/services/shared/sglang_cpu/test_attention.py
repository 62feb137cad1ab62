"""A step of all requests at once, of decoding or of prompts, gives the same as each request on its own."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_services.shared.sglang_cpu.attention import decode_all, extend_all

NUM_SLOTS, NUM_GROUPS, WIDTH = 40, 2, 8


def alone(query_HD: torch.Tensor, keys_LKD: torch.Tensor, values_LKD: torch.Tensor, scaling: float) -> torch.Tensor:
    """Attention of one token by its definition, head by head."""
    heads = []
    for head, query_D in enumerate(query_HD):
        group = head // (len(query_HD) // NUM_GROUPS)
        weights_L = torch.softmax(keys_LKD[:, group] @ query_D * scaling, dim=0)
        heads.append(weights_L @ values_LKD[:, group])
    return torch.stack(heads)


@settings(deadline=None, max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    heads_per_group=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_each_request_attends_to_its_own_tokens_and_no_others(lengths: list[int], heads_per_group: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    keys_SKD = torch.randn(NUM_SLOTS, NUM_GROUPS, WIDTH, generator=random)
    values_SKD = torch.randn(NUM_SLOTS, NUM_GROUPS, WIDTH, generator=random)
    query_BHD = torch.randn(len(lengths), NUM_GROUPS * heads_per_group, WIDTH, generator=random)
    # After the end of a row the table has slots of an earlier request: here none of them holds a number.
    slots_BL = torch.full((len(lengths), 16), NUM_SLOTS - 1, dtype=torch.int32)
    keys_SKD[-1] = values_SKD[-1] = math.nan
    for row, length in enumerate(lengths):
        slots_BL[row, :length] = torch.randperm(NUM_SLOTS - 1, generator=random)[:length]
    output_BHD = torch.empty_like(query_BHD)
    decode_all(query_BHD, output_BHD, keys_SKD, values_SKD, slots_BL, torch.tensor(lengths), 0.3)
    for row, length in enumerate(lengths):
        own = slots_BL[row, :length].long()
        expected_HD = alone(query_BHD[row], keys_SKD[own], values_SKD[own], 0.3)
        torch.testing.assert_close(output_BHD[row], expected_HD, rtol=1e-5, atol=2e-6)


def test_without_a_scale_the_width_gives_it() -> None:
    keys_SKD = torch.tensor([[[4.0, 0.0]], [[0.0, 0.0]]])
    values_SKD = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    output_BHD = torch.empty(1, 1, 2)
    query_BHD = torch.tensor([[[1.0, 0.0]]])
    decode_all(query_BHD, output_BHD, keys_SKD, values_SKD, torch.tensor([[0, 1]]), torch.tensor([2]), None)
    first = 1 / (1 + math.exp(-4 / math.sqrt(2)))
    assert output_BHD[0, 0].tolist() == pytest.approx([first, 1 - first])


def with_sinks(
    query_HD: torch.Tensor, keys_LKD: torch.Tensor, values_LKD: torch.Tensor, scaling: float, sinks_H: torch.Tensor
) -> torch.Tensor:
    heads = []
    for head, query_D in enumerate(query_HD):
        group = head // (len(query_HD) // NUM_GROUPS)
        scores_L = torch.cat([keys_LKD[:, group] @ query_D * scaling, sinks_H[head, None]])
        heads.append(torch.softmax(scores_L, dim=0)[:-1] @ values_LKD[:, group])
    return torch.stack(heads)


@pytest.mark.parametrize("window", [None, 0, 2])
def test_a_sink_takes_its_part_of_the_attention_also_in_windows(window: int | None) -> None:
    random = torch.Generator().manual_seed(0)
    keys_SKD, values_SKD = torch.randn(2, NUM_SLOTS, NUM_GROUPS, WIDTH, generator=random)
    lengths, new = [7, 3, 5], [2, 3, 1]
    query_THD, sinks_H = torch.randn(6, 4, WIDTH, generator=random), torch.randn(4, generator=random)
    slots_BL = torch.randperm(NUM_SLOTS, generator=random)[:21].view(3, 7)
    output_THD = torch.empty_like(query_THD)
    extend_all(
        query_THD, output_THD, keys_SKD, values_SKD, slots_BL, torch.tensor(lengths), torch.tensor(new), 0.3,
        window=window, sinks_H=sinks_H,
    )  # fmt: skip
    token = 0
    for row, (length, more) in enumerate(zip(lengths, new, strict=True)):
        for place in range(length - more, length):
            own = slots_BL[row, 0 if window is None else max(0, place - window) : place + 1]
            expected_HD = with_sinks(query_THD[token], keys_SKD[own], values_SKD[own], 0.3, sinks_H)
            torch.testing.assert_close(output_THD[token], expected_HD, rtol=1e-5, atol=2e-6)
            token += 1


@settings(deadline=None, max_examples=40)
@given(
    requests=st.lists(st.tuples(st.integers(0, 7), st.integers(1, 6)), min_size=1, max_size=5),
    heads_per_group=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_each_token_of_a_prompt_attends_to_those_up_to_itself(
    requests: list[tuple[int, int]], heads_per_group: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    keys_SKD = torch.randn(NUM_SLOTS, NUM_GROUPS, WIDTH, generator=random)
    values_SKD = torch.randn(NUM_SLOTS, NUM_GROUPS, WIDTH, generator=random)
    lengths, new = [cached + more for cached, more in requests], [more for _, more in requests]
    query_THD = torch.randn(sum(new), NUM_GROUPS * heads_per_group, WIDTH, generator=random)
    slots_BL = torch.full((len(requests), 16), NUM_SLOTS - 1, dtype=torch.int32)
    keys_SKD[-1] = values_SKD[-1] = math.nan
    for row, length in enumerate(lengths):
        slots_BL[row, :length] = torch.randperm(NUM_SLOTS - 1, generator=random)[:length]
    output_THD = torch.empty_like(query_THD)
    extend_all(query_THD, output_THD, keys_SKD, values_SKD, slots_BL, torch.tensor(lengths), torch.tensor(new), 0.3)
    token = 0
    for row, (cached, more) in enumerate(requests):
        for place in range(cached, cached + more):
            own = slots_BL[row, : place + 1].long()
            expected_HD = alone(query_THD[token], keys_SKD[own], values_SKD[own], 0.3)
            torch.testing.assert_close(output_THD[token], expected_HD, rtol=1e-5, atol=2e-6)
            token += 1

"""Linear attention of all requests at once gives each what transformers gives it, in one pass or several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from gspo_services.shared.sglang_cpu.gated_delta import TorchGatedDelta, activated, convolve, convolve_one, gates

LENGTHS = [5, 1, 9]
STARTS = torch.tensor([0, 5, 6, 15])
SLOTS = torch.tensor([4, 0, 2])
HEADS, VALUE_HEADS, KEY, VALUE = 2, 4, 3, 6


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pieces(inputs: dict[str, torch.Tensor], request: int, tokens: slice) -> dict[str, torch.Tensor]:
    """Some tokens of one request of inputs [1, T, ...]."""
    begin, end = STARTS[request : request + 2].tolist()
    return {name: value[:, begin:end][:, tokens] for name, value in inputs.items()}


@pytest.fixture
def inputs() -> dict[str, torch.Tensor]:
    total = int(STARTS[-1])
    shapes = {"q": (HEADS, KEY), "k": (HEADS, KEY), "v": (VALUE_HEADS, VALUE), "a": (VALUE_HEADS,), "b": (VALUE_HEADS,)}
    return {name: drawn(1, total, *shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}


def reference(inputs: dict[str, torch.Tensor], request: int, A_log: torch.Tensor, dt_bias: torch.Tensor) -> tuple[Any, Any]:
    own = pieces(inputs, request, slice(None))
    decay = -A_log.exp() * functional.softplus(own["a"] + dt_bias)
    q, k = (own[name].repeat_interleave(VALUE_HEADS // HEADS, 2) for name in "qk")
    output, state = torch_recurrent_gated_delta_rule(
        q, k, own["v"], g=decay, beta=own["b"].sigmoid(), initial_state=None, output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    return output, state.transpose(-1, -2)


def test_prompts_in_two_passes_and_a_decoded_token_are_the_recurrence(inputs: dict[str, torch.Tensor]) -> None:
    A_log, dt_bias, kernel = drawn(VALUE_HEADS, seed=8), drawn(VALUE_HEADS, seed=9), TorchGatedDelta()
    # What an earlier request left there must not matter.
    states = torch.full((6, VALUE_HEADS, VALUE, KEY), torch.nan)
    expected = [reference(inputs, request, A_log, dt_bias) for request in range(3)]

    def extend(requests: list[int], tokens: slice, prefix: int) -> torch.Tensor:
        some = [pieces(inputs, request, tokens) for request in requests]
        q, k, v, a, b = (torch.cat([each[name] for each in some], dim=1) for name in "qkvab")
        decay, beta = gates(A_log, a[0], b[0], dt_bias)
        ends = torch.tensor([each["q"].shape[1] for each in some]).cumsum(0)
        output, _, _ = kernel.extend(
            q, k, v, decay, beta, ssm_states=states, cache_indices=SLOTS[requests], extend_prefix_lens=torch.tensor(
                [prefix] * len(requests)), query_start_loc=torch.cat([torch.zeros(1, dtype=torch.long), ends]),
        )  # fmt: skip
        return output

    first = extend([0, 2], slice(0, 3), 0)
    torch.testing.assert_close(first, torch.cat([expected[0][0][:, :3], expected[2][0][:, :3]], dim=1))
    second = extend([0, 2], slice(3, -1), 3)
    torch.testing.assert_close(second, torch.cat([expected[0][0][:, 3:-1], expected[2][0][:, 3:-1]], dim=1))
    last = [pieces(inputs, request, slice(-1, None)) for request in (0, 2)]
    q, k, v, a, b = (torch.cat([each[name] for each in last], dim=1) for name in "qkvab")
    decoded = kernel.decode(
        q, k, v, a[0], b[0], A_log=A_log, dt_bias=dt_bias, ssm_states=states, cache_indices=SLOTS[[0, 2]]
    )
    torch.testing.assert_close(decoded, torch.cat([expected[0][0][:, -1:], expected[2][0][:, -1:]], dim=1))
    torch.testing.assert_close(states[SLOTS[[0, 2]]], torch.cat([expected[0][1], expected[2][1]]))
    assert states[SLOTS[1]].isnan().all()


def test_a_convolution_goes_on_where_it_was_and_begins_with_nothing() -> None:
    channels, width = 6, 4
    x_CT, weight_CW, bias_C = drawn(channels, 15), drawn(channels, width, seed=1), drawn(channels, seed=2)
    states = torch.full((6, channels, width - 1), torch.nan)
    parts = [x_CT[:, begin:end] for begin, end in zip(STARTS[:-1].tolist(), STARTS[1:].tolist(), strict=True)]
    begun_with_zeros = [functional.pad(part, (width - 1, 0)) for part in parts]
    whole = [
        functional.silu(functional.conv1d(line, weight_CW[:, None], bias_C, groups=channels)) for line in begun_with_zeros
    ]
    told = {"conv_states": states, "cache_indices": SLOTS, "activation": "silu"}
    first = torch.cat([part[:, :-1] for part in parts], dim=1)
    # The request of one token has not come yet.
    told["cache_indices"] = SLOTS[[0, 2]]
    begun = convolve(
        first, weight_CW, bias_C, has_initial_state=torch.zeros(2, dtype=torch.bool),
        query_start_loc=torch.tensor([0, 4, 12]), **told,
    )  # fmt: skip
    torch.testing.assert_close(begun, torch.cat([whole[0][:, :-1], whole[2][:, :-1]], dim=1))
    more = convolve(
        parts[0][:, -1:], weight_CW, bias_C, has_initial_state=torch.ones(1, dtype=torch.bool),
        query_start_loc=torch.tensor([0, 1]), **{**told, "cache_indices": SLOTS[:1]},
    )  # fmt: skip
    torch.testing.assert_close(more, whole[0][:, -1:])
    one = convolve_one(parts[2][:, -1][None], states, weight_CW, bias_C, "silu", conv_state_indices=SLOTS[2:])
    torch.testing.assert_close(one[0], whole[2][:, -1])
    torch.testing.assert_close(states[SLOTS[2]], parts[2][:, -3:])


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="activation gelu"):
        activated(torch.ones(1), "gelu")

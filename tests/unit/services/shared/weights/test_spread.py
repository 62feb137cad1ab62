"""Which models can be shared by which ranks."""

import re
from typing import Any, Final

import pytest

from gspo_services.shared.weights import Spread, SpreadError, require_spread

DENSE: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"], "num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 96,
    "vocab_size": 300, "num_hidden_layers": 2,
}  # fmt: skip
EXPERTS: Final[dict[str, Any]] = {
    **DENSE, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 6, "moe_intermediate_size": 64,
}  # fmt: skip
LATENT: Final[dict[str, Any]] = {
    **DENSE, "architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 6, "moe_intermediate_size": 64,
    "n_shared_experts": 1, "kv_lora_rank": 8, "num_key_value_heads": 12,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "spread"),
    [
        ({**LATENT, "num_key_value_heads": 5}, Spread(tensor=4, expert=2)),
        (DENSE, Spread()),
        (DENSE, Spread(tensor=4)),
        (DENSE, Spread(tensor=2, data=3)),
        ({**DENSE, "num_key_value_heads": 1}, Spread(tensor=4)),
        ({**DENSE, "num_key_value_heads": None, "num_attention_heads": 4}, Spread(tensor=2)),
        (EXPERTS, Spread(tensor=4, expert=2)),
        ({**EXPERTS, "intermediate_size": 7}, Spread(tensor=2)),
        # Whatever it is, a rank that has all of it is verified as ever.
        ({"architectures": ["GemmaForCausalLM"]}, Spread(data=4)),
    ],
)
def test_a_model_that_can_be_shared_is_accepted(config: dict[str, Any], spread: Spread) -> None:
    require_spread(config, spread)


@pytest.mark.parametrize(
    ("config", "spread", "words"),
    [
        (DENSE, Spread(tensor=8), "num_attention_heads is 12, which 8 ranks do not divide; use rollout.tensor_parallel = 4"),
        (
            {**DENSE, "vocab_size": 384},
            Spread(tensor=6),
            "num_key_value_heads is 4 and rollout.tensor_parallel is 6: neither divides",
        ),
        ({**DENSE, "intermediate_size": 99}, Spread(tensor=4), "intermediate_size is 99, which 4 ranks do not divide"),
        ({**DENSE, "num_key_value_heads": 3}, Spread(tensor=3), "vocab_size, padded to 64, is 320, which 3 ranks do not"),
        (
            EXPERTS,
            Spread(tensor=4, expert=4),
            "the number of experts is 6, which 4 ranks do not divide; use rollout.tensor_parallel = 4 and "
            "rollout.expert_parallel = 2",
        ),
        ({**EXPERTS, "moe_intermediate_size": 6}, Spread(tensor=4), "the width of an expert is 6, which 4 ranks do not"),
        ({**EXPERTS, "mlp_only_layers": [0], "intermediate_size": 7}, Spread(tensor=2), "intermediate_size is 7, which 2"),
        (DENSE, Spread(tensor=2, expert=2), "rollout.expert_parallel is 2 and LlamaForCausalLM has no experts"),
        (EXPERTS, Spread(tensor=2, expert=4), "rollout.expert_parallel is 4, which does not divide"),
        (
            {**DENSE, "architectures": ["GemmaForCausalLM"]},
            Spread(tensor=2),
            "GemmaForCausalLM over 2 ranks: it is not known",
        ),
        ({**DENSE, "architectures": []}, Spread(tensor=2), "? over 2 ranks: it is not known"),
        (
            {**EXPERTS, "architectures": ["OlmoeForCausalLM"]},
            Spread(tensor=2),
            "OlmoeForCausalLM over 2 ranks: SGLang's class normalises the heads of a rank as if they were all",
        ),
        (
            {**LATENT, "moe_shared_expert_intermediate_size": 6},
            Spread(tensor=4, expert=2),
            "the width of shared experts is 6, which 4 ranks do not divide",
        ),
    ],
)
def test_a_model_that_cannot_be_shared_so_is_refused_with_the_way_out(
    config: dict[str, Any], spread: Spread, words: str
) -> None:
    with pytest.raises(SpreadError, match=re.escape(words)) as caught:
        require_spread(config, spread)
    assert "use rollout." in str(caught.value) or "make one" in str(caught.value)


def test_ranks_are_counted_and_grouped() -> None:
    spread = Spread(tensor=4, expert=2, data=3)
    assert (spread.num_ranks, spread.is_whole, Spread(data=2).is_whole) == (12, False, True)
    assert [(spread.expert_group(rank), spread.rank_in_group(rank)) for rank in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_number_of_experts_that_is_none_is_named() -> None:
    with pytest.raises(SpreadError, match=r"num_experts is six: expected a number from 1 up; correct config\.json"):
        require_spread({**EXPERTS, "num_experts": "six"}, Spread(tensor=2))

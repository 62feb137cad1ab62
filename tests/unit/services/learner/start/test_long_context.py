"""How long a sequence may be, and how many ranks can share it."""

from __future__ import annotations

from typing import Any

import pytest

from gspo_services.learner.start import position_limit, require_apart, require_positions, require_sequence_parallel
from gspo_services.shared.settings.configuration import validated

MODEL = {"num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 4096}


@pytest.mark.parametrize(("size", "num_ranks"), [(1, 1), (2, 2), (2, 8), (4, 8), (12, 12)])
def test_sizes_that_divide_ranks_and_heads_are_accepted(size: int, num_ranks: int) -> None:
    require_sequence_parallel(MODEL, size, num_ranks=num_ranks)


@pytest.mark.parametrize(
    ("size", "num_ranks", "changes", "message"),
    [
        (4, 2, {}, "sequence_parallel is 4 and there are 2 ranks, .*; use at most 2, or more ranks"),
        (2, 3, {}, r"which does not divide the number of ranks \(3\); use one of 1$"),
        (8, 8, {}, r"does not divide the model's attention heads \(12\); use one of 1, 2, 4$"),
        (6, 12, {}, "is 6 and the model has 4 key heads, which neither divide it nor .*; use one of 1, 2, 4, 12$"),
        (5, 5, {"num_key_value_heads": None}, r"attention heads \(12\); use one of 1$"),
    ],
)
def test_other_sizes_are_refused_with_those_that_fit(
    size: int, num_ranks: int, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        require_sequence_parallel(MODEL | changes, size, num_ranks=num_ranks)


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_families_whose_sequences_get_rows_of_their_own_are_trained(kind: str) -> None:
    require_apart({"model_type": kind, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2})
    require_apart(MODEL | {"layer_types": ["full_attention"], "mamba_d_state": None})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "minimax", "layer_types": ["linear_attention"]}, "minimax has layers .*(linear_attention), and"),
        ({"model_type": "kimi_linear", "linear_attn_config": {"a": 1}}, "(linear_attn_config)"),
        ({"model_type": "jamba", "mamba_d_state": 16}, "(mamba_d_state)"),
        ({"model_type": "lfm2", "full_attn_idxs": [2, 5]}, "(full_attn_idxs)"),
    ],
)
def test_families_whose_state_would_pass_from_one_sequence_to_the_next_are_refused(
    config: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words.replace("(", r"\(").replace(")", r"\)")):
        require_apart(config)


def test_a_state_that_goes_from_token_to_token_cannot_be_shared() -> None:
    mixed = MODEL | {"layer_types": ["linear_attention", "full_attention"]}
    require_sequence_parallel(mixed, 1, num_ranks=2)
    with pytest.raises(ValueError, match=r"layers of linear_attention, .*; use sequence_parallel = 1"):
        require_sequence_parallel(mixed, 2, num_ranks=2)


def test_a_load_balancing_loss_needs_whole_rows() -> None:
    require_sequence_parallel(MODEL, 1, num_ranks=2, load_balance=True)
    with pytest.raises(ValueError, match="load_balance_coefficient = 0, or use sequence_parallel = 1"):
        require_sequence_parallel(MODEL, 2, num_ranks=2, load_balance=True)


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({}, None),
        ({"max_position_embeddings": 4096}, 4096),
        ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 2.0}}, 8192),
        (
            {
                "max_position_embeddings": 40960,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_parameters": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
            },
            131072,
        ),
    ],
)
def test_the_position_limit_counts_scaled_positions(config: dict[str, Any], limit: int | None) -> None:
    assert position_limit(config) == limit


def test_sequences_beyond_the_models_positions_are_refused_with_both_figures() -> None:
    def settings(max_tokens: int) -> Any:
        return validated({"sampling": {"max_tokens": max_tokens}}, "test")

    require_positions(MODEL, settings(4096))
    with pytest.raises(ValueError, match=r"may have 4,097 tokens, .* has 4,096 positions .*; lower it to at most 4096, or"):
        require_positions(MODEL, settings(4097))

"""Models of the comparison: random Qwen3-MoEs from a quarter of a million to some thirty million parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Shape:
    """The sizes that set a model's cost; two experts of ``experts`` process each token."""

    name: str
    vocabulary: int = 264
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    experts: int = 8
    expert_hidden: int = 64


TINY = Shape("tiny")
"""The shape of the demonstration's models/tiny."""
MEDIUM = Shape("medium", vocabulary=4096, hidden=256, layers=8, heads=4, experts=16, expert_hidden=224)


def build(shape: Shape, dtype: str, *, attention: str = "sdpa") -> Any:
    """Return a causal language model of this shape, with the same weights at each call."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=2 * shape.hidden,
        moe_intermediate_size=shape.expert_hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=1 if shape.heads % 2 else shape.heads // 2,
        head_dim=shape.hidden // shape.heads,
        num_experts=shape.experts,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        eos_token_id=shape.vocabulary - 1,
        pad_token_id=shape.vocabulary - 2,
        attn_implementation=attention,
    )
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config).to(DTYPES[dtype]).train()


def num_parameters(model: Any) -> int:
    """Return the parameters of the whole model, all experts included."""
    return sum(parameter.numel() for parameter in model.parameters())

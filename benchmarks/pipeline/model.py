"""The model of the measured runs: a random mixture of experts of any size, with the tiny model's tokenizer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from gspo_services.prepare.tiny_models.tokenizer import VOCAB_SIZE, build_tokenizer


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The sizes that decide how long a token takes in both halves."""

    hidden_size: int
    num_hidden_layers: int
    moe_intermediate_size: int
    num_experts: int = 8
    num_experts_per_tok: int = 2


def make_model(directory: Path, size: ModelSize, seed: int = 0) -> int:
    """Write an ordinary Hugging Face model in float32. Returns its number of parameters.

    Its tokens are almost equally likely, so that answers end by chance (one token of 264 is the end) or at their limit.
    """
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        head_dim=32,
        num_attention_heads=size.hidden_size // 32,
        num_key_value_heads=2,
        intermediate_size=2 * size.moe_intermediate_size,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        **asdict(size),
    )
    config.dtype = torch.float32
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())

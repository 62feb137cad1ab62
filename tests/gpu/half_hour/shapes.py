"""Models with random weights in the shapes of real ones, and a tokenizer of as many words as they have token ids."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig

from gspo_services.prepare.tiny_models.tokenizer import CHAT_TEMPLATE, END, MARKERS, PAD

QWEN3_30B_A3B: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
"""https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json, which has 48 layers."""
SMALL: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
}
"""For trying the same steps without a GPU. SGLang's rotary kernel for CUDA knows heads of 64, 128, 256 and 512."""
SHAPES = {"30b": QWEN3_30B_A3B, "small": SMALL}


def word_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Ids 0 to V - 17 are the words w0, w1, ...; then the markers of a chat; the last ids stay unused."""
    words = [f"w{number}" for number in range(vocab_size - 16)]
    vocabulary = {word: index for index, word in enumerate([*words, *MARKERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    result = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[marker for marker in MARKERS if marker not in (END, PAD)],
        clean_up_tokenization_spaces=False,
    )
    result.chat_template = CHAT_TEMPLATE
    return result


def moe_config(shape: dict[str, Any], num_layers: int) -> Qwen3MoeConfig:
    """The configuration of ``num_layers`` layers of this shape."""
    config = Qwen3MoeConfig(
        **shape,
        num_hidden_layers=num_layers,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=40_960,
        rope_theta=1e6,
        tie_word_embeddings=False,
        attention_bias=False,
        use_sliding_window=False,
    )
    config.dtype = torch.bfloat16
    return config


def write_model(directory: Path, shape: dict[str, Any], num_layers: int) -> int:
    """Write weights, configuration and tokenizer. Returns the number of parameters."""
    tokenizer = word_tokenizer(shape["vocab_size"])
    config = moe_config(shape, num_layers)
    config.eos_token_id, config.pad_token_id, config.bos_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id, None
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    # Logits of a spread of about 1, as trained models have: otherwise all policies are uniform.
    with torch.no_grad():
        model.lm_head.weight.normal_(std=shape["hidden_size"] ** -0.5)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="30b")
    parser.add_argument("--layers", type=int, default=2)
    chosen = parser.parse_args()
    print(write_model(chosen.directory, SHAPES[chosen.shape], chosen.layers))

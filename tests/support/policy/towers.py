"""Tiny random checkpoints whose classes also take images, in the files that are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from safetensors.torch import load_file, save_file

from tests.support.learner.tiny_model import TINY_EOS_TOKEN_ID, TINY_VOCAB_SIZE

_TEXT: Final[dict[str, Any]] = {
    "vocab_size": TINY_VOCAB_SIZE + 4, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "eos_token_id": TINY_EOS_TOKEN_ID, "bos_token_id": 0, "pad_token_id": 5,
}  # fmt: skip
_LINEAR: Final[dict[str, Any]] = {
    "head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
}  # fmt: skip
_EXPERTS: Final[dict[str, Any]] = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
_EYE: Final[dict[str, Any]] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 56,
    "patch_size": 14,
}  # fmt: skip
_QWEN: Final[dict[str, Any]] = {
    "vision_config": {
        "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
        "num_position_embeddings": 16,
    },
    "image_token_id": TINY_VOCAB_SIZE, "video_token_id": TINY_VOCAB_SIZE + 1,
    "vision_start_token_id": TINY_VOCAB_SIZE + 2, "vision_end_token_id": TINY_VOCAB_SIZE + 3,
    "tie_word_embeddings": False,
}  # fmt: skip
CHECKPOINTS: Final[dict[str, dict[str, Any]]] = {
    "gemma3": {
        "text_config": {**_TEXT, "query_pre_attn_scalar": 16, "sliding_window": 16, "num_hidden_layers": 6},
        "vision_config": {**_EYE, "vision_use_head": False}, "mm_tokens_per_image": 4,
        "boi_token_index": TINY_VOCAB_SIZE, "eoi_token_index": TINY_VOCAB_SIZE + 1, "image_token_index": TINY_VOCAB_SIZE + 2,
    },
    "mistral3": {
        "text_config": {**_TEXT, "model_type": "mistral", "sliding_window": None, "tie_word_embeddings": False},
        "vision_config": {**_EYE, "model_type": "pixtral", "head_dim": 16}, "image_token_index": TINY_VOCAB_SIZE,
        "tie_word_embeddings": False,
    },
    "qwen3_5": {"text_config": {**_TEXT, **_LINEAR}, **_QWEN},
    "qwen3_5_moe": {"text_config": {**_TEXT, **_LINEAR, **_EXPERTS}, **_QWEN},
}  # fmt: skip
"""By ``model_type``."""
_KEPT: Final = ("full_attention_interval",)
"""Keys of published files that SGLang reads and transformers drops when it saves."""


def save_checkpoint(directory: Path, kind: str, seed: int = 0) -> Any:
    """Write one in float32; return the whole model."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(kind, **json.loads(json.dumps(CHECKPOINTS[kind])))
    model = transformers.AutoModelForImageTextToText.from_config(config).float().eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            wide = 0.3 if "embed_tokens" in name or "lm_head" in name else 0.06 if "linear_attn" in name else 0.12
            if name.endswith("A_log"):
                value.normal_(-2.0, 0.1)  # A state fades slowly.
            elif value.dim() >= 2 and "conv1d" not in name:
                value.normal_(0.0, wide)
    model.save_pretrained(directory)
    _as_published(directory, kind)
    return model


def _as_published(directory: Path, kind: str) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["text_config"] |= {
        key: CHECKPOINTS[kind]["text_config"][key] for key in _KEPT if key in CHECKPOINTS[kind]["text_config"]
    }
    path.write_text(json.dumps(config, indent=2))
    if kind == "gemma3":
        file = directory / "model.safetensors"
        named = {name.replace("vision_tower.", "vision_tower.vision_model."): each for name, each in load_file(file).items()}
        save_file(named, file, metadata={"format": "pt"})

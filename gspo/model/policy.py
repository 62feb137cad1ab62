"""A Hugging Face causal language model prepared for training on packed sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from gspo.model.activations import keep_checkpoints_on_host, tile_mlps
from gspo.model.attention import register_segment_attention
from gspo.model.linear_attention import LINEAR_ATTENTION, by_rows
from gspo.model.logprobs import attach_logprob_head
from gspo.model_files.loading import WHOLE_MODEL, WeightPlaces, load_converted, load_from_files

PACKED_LAYERS: Final = frozenset({"full_attention", "sliding_attention"})
"""Types of layers whose attention is computed within each segment of a packed row."""


def load_policy(model_dir: Path, dtype: torch.dtype, placement: WeightPlaces = WHOLE_MODEL) -> Any:
    """Load a causal language model from a local directory, with attention per segment. Collective where ``placement`` is.

    Raises: ValueError when the directory holds no model, or not the one that its config.json describes.
    """
    if not (model_dir / "config.json").is_file():
        raise ValueError(f"{model_dir} holds no config.json; give the directory of a Hugging Face model")
    attention = register_segment_attention()
    model = load_from_files(model_dir, dtype, attention=attention, placement=placement)
    if model is None:
        model = load_converted(model_dir, dtype, attention=attention, placement=placement)
    restore_rotary_frequencies(model)
    return model


def restore_rotary_frequencies(model: Any) -> None:
    """Restore float32 frequencies of rotary position embeddings where something has rounded them.

    DeepSpeed's ZeRO-3 gives every new floating-point buffer the model's dtype. In bfloat16 a frequency is off by up to
    0.4 %: at position 1,000 the fastest angle is wrong by radians, and the model is no longer the engine's.
    """
    for module in model.modules():
        frequencies = module._buffers.get("inv_freq")
        if frequencies is None or frequencies.dtype == torch.float32:
            continue
        exact = type(module)(module.config).to(frequencies.device)
        for name, buffer in exact.named_buffers(recurse=False):
            module._buffers[name] = buffer


def follow_configured_epsilon(model: Any) -> None:
    """Give the norms of latent attention the ``rms_norm_eps`` of the configuration, as engines do.

    transformers leaves theirs at 1e-6, which GLM-4.7-Flash's 1e-5 is not (SGLang: DeepseekV2AttentionMLA).
    """
    for name, module in model.named_modules():
        if name.endswith((".q_a_layernorm", ".kv_a_layernorm")):
            module.variance_epsilon = model.config.rms_norm_eps


def prepare_policy(
    model: Any,
    *,
    logprob_chunk_tokens: int,
    activation_checkpointing: bool = False,
    checkpoints_on_host: bool = False,
    mlp_tiles: int = 1,
    float32_head: bool = False,
    fused_head: bool = True,
) -> None:
    """Make ``model`` return log-probs of packed sequences (see ``attach_logprob_head``), as the sampler sees them.

    Dropout is switched off: with clip ranges of 3e-4 its noise would clip everything.
    Raises: ValueError for a model that mixes tokens by anything but causal or gated linear attention, or adds noise to
    routing.
    """
    config = model.config.to_dict()
    others = set(config.get("layer_types") or ()) - PACKED_LAYERS - {LINEAR_ATTENTION}
    if others:
        known = ", ".join(sorted({*PACKED_LAYERS, LINEAR_ATTENTION}))
        raise ValueError(f"{type(model).__name__} has layers of type {sorted(others)}; only {known} can be trained")
    if config.get("num_kv_shared_layers"):
        raise ValueError(
            f"{type(model).__name__} has {config['num_kv_shared_layers']} layers that take their keys from others "
            "(num_kv_shared_layers); without a cache they cannot be trained: use another model"
        )
    if config.get("router_jitter_noise"):
        raise ValueError(f"router_jitter_noise is {config['router_jitter_noise']}; set it to 0 in config.json")
    model.set_attn_implementation(register_segment_attention())
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    by_rows(model)
    follow_configured_epsilon(model)
    attach_logprob_head(model, chunk_tokens=logprob_chunk_tokens, float32=float32_head, fused=fused_head)
    if activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if checkpoints_on_host:
            keep_checkpoints_on_host(model)
    if mlp_tiles > 1 and not tile_mlps(model, mlp_tiles):
        raise ValueError(f"mlp_tiles is {mlp_tiles} and {type(model).__name__} has no gated MLP to tile; use mlp_tiles = 1")
    # transformers checkpoints activations only in training mode.
    model.train()

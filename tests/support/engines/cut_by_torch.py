"""What each rank of a server holds of a model, cut by torch alone: the reference for the project's own arithmetic."""

from collections.abc import Mapping

import torch

Weights = dict[str, torch.Tensor]


def random_weights(
    *, heads: int = 4, kv_heads: int = 2, experts: int = 0, vocabulary: int = 70, biases: bool = False, seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> Weights:  # fmt: skip
    """A layer in the shape of Llama (``biases``), Qwen3, or Qwen3-MoE (``experts``), in an order of its own."""
    generator = torch.Generator().manual_seed(seed)
    hidden, width, ffn, layer = 16, 4, 24, "model.layers.0"
    shapes: dict[str, tuple[int, ...]] = {
        "lm_head.weight": (vocabulary, hidden),
        f"{layer}.self_attn.v_proj.weight": (kv_heads * width, hidden),
        f"{layer}.self_attn.o_proj.weight": (hidden, heads * width),
        f"{layer}.self_attn.q_proj.weight": (heads * width, hidden),
        f"{layer}.self_attn.k_proj.weight": (kv_heads * width, hidden),
        "model.embed_tokens.weight": (vocabulary, hidden),
        f"{layer}.input_layernorm.weight": (hidden,),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
        "model.norm.weight": (hidden,),
    }
    if biases:
        shapes |= {f"{layer}.self_attn.{part}_proj.bias": (kv_heads * width,) for part in "kv"}
        shapes |= {f"{layer}.self_attn.q_proj.bias": (heads * width,), f"{layer}.self_attn.o_proj.bias": (hidden,)}
        shapes |= {f"{layer}.mlp.{part}_proj.bias": (ffn,) for part in ("up", "gate")} | {
            f"{layer}.mlp.down_proj.bias": (hidden,)
        }
    else:
        shapes |= {f"{layer}.self_attn.{part}_norm.weight": (width,) for part in "qk"}
    prefixes = [f"{layer}.mlp.experts.{each}" for each in range(experts)] if experts else [f"{layer}.mlp"]
    for prefix in prefixes:
        shapes |= {f"{prefix}.down_proj.weight": (hidden, ffn)}
        shapes |= {f"{prefix}.{part}_proj.weight": (ffn, hidden) for part in ("up", "gate")}
    if experts:
        shapes[f"{layer}.mlp.gate.weight"] = (experts, hidden)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def rank_weights(
    weights: Mapping[str, torch.Tensor], rank: int, *, tensor: int, expert: int = 1, kv_heads: int = 2
) -> Weights:
    """The parameters of tensor rank ``rank``, by SGLang's names."""
    layer, cut = "model.layers.0", {}
    group, in_group = divmod(rank, tensor // expert)

    def rows(name: str, part: int = rank, parts: int = tensor) -> torch.Tensor:
        return weights[name].chunk(parts, dim=0)[part]

    def columns(name: str, part: int = rank, parts: int = tensor) -> torch.Tensor:
        return weights[name].chunk(parts, dim=1)[part]

    for kind in ("weight", "bias"):
        if f"{layer}.self_attn.q_proj.{kind}" in weights:
            parts = min(kv_heads, tensor)
            part = rank // (tensor // parts)
            cut[f"{layer}.self_attn.qkv_proj.{kind}"] = torch.cat(
                [rows(f"{layer}.self_attn.q_proj.{kind}")]
                + [rows(f"{layer}.self_attn.{each}_proj.{kind}", part, parts) for each in "kv"]
            )
        if f"{layer}.mlp.gate_proj.{kind}" in weights:
            both = [rows(f"{layer}.mlp.{each}_proj.{kind}") for each in ("gate", "up")]
            cut[f"{layer}.mlp.gate_up_proj.{kind}"] = torch.cat(both)
    for name in (f"{layer}.self_attn.o_proj.weight", f"{layer}.mlp.down_proj.weight"):
        if name in weights:
            cut[name] = columns(name)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        padding = torch.zeros(-weights[name].shape[0] % 64, weights[name].shape[1], dtype=weights[name].dtype)
        cut[name] = torch.cat([weights[name], padding]).chunk(tensor)[rank]
    prefix = f"{layer}.mlp.experts"
    num_experts = sum(name.startswith(prefix) for name in weights) // 3
    if num_experts:
        own = range(num_experts // expert * group, num_experts // expert * (group + 1))
        parts = tensor // expert
        cut[f"{prefix}.w13_weight"] = torch.stack(
            [torch.cat([rows(f"{prefix}.{e}.{each}_proj.weight", in_group, parts) for each in ("gate", "up")]) for e in own]
        )
        cut[f"{prefix}.w2_weight"] = torch.stack([columns(f"{prefix}.{e}.down_proj.weight", in_group, parts) for e in own])
    whole = ("norm.weight", "layernorm.weight", "mlp.gate.weight", "o_proj.bias", "down_proj.bias")
    cut |= {name: tensor_ for name, tensor_ in weights.items() if name.endswith(whole)}
    return {name: each.contiguous() for name, each in cut.items()}


def bits(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes, row by row."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()

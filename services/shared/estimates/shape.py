"""Computes the shape of a decoder, and its numbers of parameters, from its config.json alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gspo.moe.mixture import MOST_LAYERS, mixture_of

QK_NORM: Final = frozenset({"qwen3", "qwen3_moe"})
"""Families that normalise each head of queries and keys."""
WIDE_QK_NORM: Final = frozenset({"minimax_m2", "olmoe"})
"""Families that normalise all heads of queries, and all of keys, together."""
FLOAT32_GATES: Final = frozenset({"glm4_moe"})
"""Families whose gates are float32, and with them the experts' results that they multiply."""
QKV_BIAS: Final = frozenset({"qwen2", "qwen2_moe"})
"""Families with a bias on queries, keys and values that config.json does not mention."""


NO_OUTPUT_BIAS: Final = QKV_BIAS | {"glm4_moe"}
"""Families whose attention has a bias everywhere but on its output."""
EXPERT_BIAS: Final = frozenset({"gpt_oss"})
"""Families with biases on experts and routers, and a sink for each head."""


class ShapeError(ValueError):
    """config.json does not give the model's shape; the text names the key."""


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): its ranks, and the parts of a head."""

    q_rank: int
    """0: queries are not compressed."""
    kv_rank: int
    nope: int
    """Of queries and keys, without positions."""
    rope: int
    """The same with positions."""
    value: int

    @property
    def head_width(self) -> int:
        """What costs in attention as much as a head of keys and one of values of this size."""
        return (self.nope + self.rope + self.value) // 2

    def parameters(self, hidden: int, heads: int) -> int:
        """Of one layer."""
        queries = heads * (self.nope + self.rope)
        of_queries = self.q_rank * (hidden + 1 + queries) if self.q_rank else hidden * queries
        of_keys = hidden * (self.kv_rank + self.rope) + self.kv_rank * (1 + heads * (self.nope + self.value))
        return of_queries + of_keys + heads * self.value * hidden


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Layers of attention and a gated MLP, or of attention and a mixture of such MLPs.

    Parameters are those of transformers' classes:

        embedding V H, head V H unless tied, a norm H at the end; in each layer
        attention  H D (Q + 2 K) + Q D H,  norms 2 H,  and 2 D where heads are normalised;  or ``Latent``
        MLP 3 H I;  or a router E H and E experts of 3 H I_e, and perhaps a shared one of 3 H I_s, with a gate H
    """

    model_type: str
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    """Width of the MLP of a dense layer."""
    experts: int = 0
    """Of a layer; 0: a dense model."""
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    """Width of an expert that every token uses; 0: none."""
    shared_gate: bool = False
    """The shared expert has a gate of its own."""
    dense_layers: int = 0
    """Layers of a mixture of experts that have an ordinary MLP."""
    tied: bool = False
    """The head is the embedding."""
    qk_norm: bool = False
    float32_gates: bool = False
    biases: int = 0
    """Number of biases of attention in a layer."""
    max_positions: int | None = None
    latent: Latent | None = None
    """Attention by compressed keys and values, in place of the ordinary one."""

    @property
    def expert_parameters(self) -> int:
        """E of docs/guide/learner.md: parameters in the experts that a router chooses from."""
        return self.mixed_layers * self.experts * 3 * self.hidden * self.expert_ffn

    @property
    def other_parameters(self) -> int:
        """P of docs/guide/learner.md: all other parameters."""
        hidden = self.hidden
        attention = hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads) + self.biases
        if self.latent is not None:
            attention = self.latent.parameters(hidden, self.heads)
        norms = 2 * hidden + (2 * self.head_dim if self.qk_norm else 0)
        if self.model_type in WIDE_QK_NORM:
            norms = 2 * hidden + (self.heads + self.kv_heads) * self.head_dim
        mixed = self.experts * hidden + 3 * hidden * self.shared_ffn + (hidden if self.shared_gate else 0)
        if self.model_type in EXPERT_BIAS:
            mixed += self.experts * (2 * self.expert_ffn + hidden + 1) + self.heads
        dense = 3 * hidden * self.ffn
        of_layers = self.layers * (attention + norms) + self.mixed_layers * mixed + self._plain_layers * dense
        return of_layers + (1 if self.tied else 2) * self.vocabulary * hidden + hidden

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.expert_parameters + self.other_parameters

    @property
    def active_parameters(self) -> int:
        """The weights that multiply one token: the head, but not the embedding; the chosen experts only."""
        share = self.experts_per_token / self.experts if self.experts else 0.0
        looked_up = 0 if self.tied else self.vocabulary * self.hidden
        return round(self.other_parameters - looked_up + share * self.expert_parameters)

    @property
    def attention_width(self) -> int:
        """heads x head_dim x layers: 2 L^2 times this are the operations of causal attention."""
        width = self.head_dim if self.latent is None else self.latent.head_width
        return self.heads * width * self.layers

    @property
    def largest_layer(self) -> int:
        """Parameters of the largest layer, which ZeRO 3 gathers to compute it."""
        of_experts = self.experts * 3 * self.hidden * self.expert_ffn
        return of_experts or 3 * self.hidden * self.ffn + 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    def gathered_layer(self, expert_parallel: int) -> int:
        """``largest_layer`` on one of the ranks that share the layer's experts."""
        return self.largest_layer // (expert_parallel if self.experts else 1)

    def lora_parameters(self, rank: int, targets: Sequence[str]) -> int:
        """Parameters of adapters of ``rank``: rank times the sum of both dimensions, for each adapted matrix."""
        hidden, heads, keys = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        sums = {
            "attention": self.layers * (2 * (hidden + heads) + 2 * (hidden + keys)),
            "mlp": self._plain_layers * 3 * (hidden + self.ffn),
            # Gate and up are one matrix here, and have one A.
            "experts": self.mixed_layers * self.experts * (hidden + 2 * self.expert_ffn + self.expert_ffn + hidden),
        }
        return rank * sum(sums[target] for target in targets)

    def kv_bytes(self, element_bytes: int) -> int:
        """Return the bytes of the KV cache for one token: a key and a value in each layer."""
        if self.latent is not None:
            return self.layers * (self.latent.kv_rank + self.latent.rope) * element_bytes
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes

    @property
    def mixed_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def _plain_layers(self) -> int:
        return self.layers - self.mixed_layers


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Read the shape from config.json. Raises: ShapeError."""
    model_type = str(config.get("model_type", ""))
    heads, hidden = _number(config, "num_attention_heads"), _number(config, "hidden_size")
    layers, kv_heads = _number(config, "num_hidden_layers"), _number(config, "num_key_value_heads", heads)
    if layers > MOST_LAYERS:
        raise ShapeError(f"num_hidden_layers is {layers}: at most {MOST_LAYERS:,} are read; correct config.json")
    head_dim = _number(config, "head_dim", max(1, hidden // heads))
    try:
        mixture = mixture_of(config)
    except ValueError as error:
        raise ShapeError(str(error)) from error
    all_mixed = mixture and not mixture.dense_layers
    ffn = _number(config, "intermediate_size", mixture.width if all_mixed else None)
    has_bias = bool(config.get("attention_bias", model_type in QKV_BIAS))
    return ModelShape(
        model_type=model_type,
        vocabulary=_number(config, "vocab_size"),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        experts=mixture.experts,
        experts_per_token=mixture.chosen,
        expert_ffn=mixture.width,
        shared_ffn=mixture.shared_width,
        shared_gate=mixture.shared_gate,
        dense_layers=len(mixture.dense_layers),
        tied=bool(config.get("tie_word_embeddings", False)),
        qk_norm=bool(config.get("use_qk_norm", model_type in QK_NORM)),
        float32_gates=model_type in FLOAT32_GATES,
        biases=(heads + 2 * kv_heads) * head_dim + (0 if model_type in NO_OUTPUT_BIAS else hidden) if has_bias else 0,
        max_positions=_number(config, "max_position_embeddings") if config.get("max_position_embeddings") else None,
        latent=_latent(config),
    )


def _latent(config: Mapping[str, Any]) -> Latent | None:
    if not config.get("kv_lora_rank"):
        return None
    return Latent(
        q_rank=_number(config, "q_lora_rank") if config.get("q_lora_rank") else 0,
        kv_rank=_number(config, "kv_lora_rank"),
        nope=_number(config, "qk_nope_head_dim"),
        rope=_number(config, "qk_rope_head_dim"),
        value=_number(config, "v_head_dim"),
    )


def _number(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**40:
        raise ShapeError(f"{key} is {str(value)[:100]}: expected a number from 1 up")
    return value

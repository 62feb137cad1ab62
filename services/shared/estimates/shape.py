"""Computes the shape of a decoder, and its numbers of parameters, from its config.json alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gspo.model_files.configuration import STATES
from gspo.moe.mixture import MOST_LAYERS, mixture_of
from gspo_services.shared.estimates.attention import Latent, Linear

_GATED_LINEAR: Final = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
"""Families with ``Linear`` layers, whose other layers have a gate as wide as their queries."""
QK_NORM: Final = frozenset({"gemma3_text", "qwen3", "qwen3_moe"}) | _GATED_LINEAR
"""Families that normalise each head of queries and keys."""
WIDE_QK_NORM: Final = frozenset({"minimax_m2", "olmoe"})
"""Families that normalise all heads of queries, and all of keys, together."""
FLOAT32_GATES: Final = frozenset({"deepseek_v3", "glm4_moe", "glm4_moe_lite", "minimax_m2", "mixtral"})
"""Families whose gates are float32, and with them the experts' results that they multiply."""
QKV_BIAS: Final = frozenset({"qwen2", "qwen2_moe"})
"""Families with a bias on queries, keys and values that config.json does not mention."""


NO_OUTPUT_BIAS: Final = QKV_BIAS | {"glm", "glm4", "glm4_moe"}
"""Families whose attention has a bias everywhere but on its output."""
EXPERT_BIAS: Final = frozenset({"gpt_oss"})
"""Families with biases on experts and routers, and a sink for each head."""
FOUR_NORMS: Final = frozenset({"gemma2", "gemma3_text", "glm4"})
"""Families that also normalise what attention and MLP give."""
UNGATED: Final = frozenset({"apertus", "arcee", "nemotron", "persimmon", "phi", "starcoder2"})
"""Families whose MLPs are two matrices, without a gate."""
_UNCOUNTED: Final = frozenset({"gemma3n_text", "gemma4_text", "hrm_text", "lfm2", "llama4_text", "olmo_hybrid"})
"""Families with parameters that nobody has counted here."""
_COUNTED_LAYERS: Final = frozenset({"full_attention", "sliding_attention"})
_LINEAR: Final = "linear_attention"


class ShapeError(ValueError):
    """config.json does not give the model's shape; the text names the key."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Layers of attention and a gated MLP, or of attention and a mixture of such MLPs.

    Parameters are those of transformers' classes:

        embedding V H, head V H unless tied, a norm H at the end; in each layer
        attention  H D (Q + 2 K) + Q D H,  norms 2 H,  and 2 D where heads are normalised;  or ``Latent``, ``Linear``
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
    linear: Linear | None = None
    """In some layers, in place of the ordinary one."""

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
        attention += 2 * self.head_dim if self.qk_norm else 0
        if self.model_type in WIDE_QK_NORM:
            attention += (self.heads + self.kv_heads) * self.head_dim
        if self.model_type in _GATED_LINEAR:
            attention += hidden * self.heads * self.head_dim
        of_linear = self.linear.layers * self.linear.parameters(hidden) if self.linear else 0
        norms = (4 if self.model_type in FOUR_NORMS else 2) * hidden
        mixed = self.experts * hidden + 3 * hidden * self.shared_ffn + (hidden if self.shared_gate else 0)
        if self.model_type in EXPERT_BIAS:
            mixed += self.experts * (2 * self.expert_ffn + hidden + 1) + self.heads
        dense = (2 if self.model_type in UNGATED else 3) * hidden * self.ffn
        of_layers = self.layers * norms + self._attending * attention + of_linear
        of_layers += self.mixed_layers * mixed + self._plain_layers * dense
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
        return self.heads * width * self._attending

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
        queries = heads * (2 if self.model_type in _GATED_LINEAR else 1)
        attention = (hidden + queries) + (heads + hidden) + 2 * (hidden + keys)
        sums = {
            "attention": self._attending * (self.latent.sides(hidden, self.heads) if self.latent else attention),
            "mlp": self._plain_layers * 3 * (hidden + self.ffn),
            # Gate and up are one matrix here, and have one A.
            "experts": self.mixed_layers * self.experts * (hidden + 2 * self.expert_ffn + self.expert_ffn + hidden),
        }
        return rank * sum(sums[target] for target in targets)

    def kv_bytes(self, element_bytes: int) -> int:
        """Return the bytes of the KV cache for one token: a key and a value in each layer that has attention."""
        if self.latent is not None:
            return self.layers * (self.latent.kv_rank + self.latent.rope) * element_bytes
        return 2 * self._attending * self.kv_heads * self.head_dim * element_bytes

    @property
    def mixed_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def normalises_heads(self) -> bool:
        """Of queries and keys, each by itself or all together."""
        return self.qk_norm or self.model_type in WIDE_QK_NORM

    @property
    def _attending(self) -> int:
        """Layers with attention over all tokens before, or those in a window."""
        return self.layers - (self.linear.layers if self.linear else 0)

    @property
    def _plain_layers(self) -> int:
        return self.layers - self.mixed_layers


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Read the shape from config.json. Raises: ShapeError."""
    model_type = str(config.get("model_type", ""))
    _require_counted(model_type, config)
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
        qk_norm=bool(config.get("use_qk_norm", model_type in QK_NORM)) and model_type not in WIDE_QK_NORM,
        float32_gates=model_type in FLOAT32_GATES,
        biases=(heads + 2 * kv_heads) * head_dim + (0 if model_type in NO_OUTPUT_BIAS else hidden) if has_bias else 0,
        max_positions=_number(config, "max_position_embeddings") if config.get("max_position_embeddings") else None,
        latent=_latent(config),
        linear=_linear(config, layers) if model_type in _GATED_LINEAR else None,
    )


def _require_counted(model_type: str, config: Mapping[str, Any]) -> None:
    given = config.get("layer_types")
    known = _COUNTED_LAYERS | ({_LINEAR} if model_type in _GATED_LINEAR else set())
    others = sorted({str(kind) for kind in given} - known) if isinstance(given, list) else []
    state = next((key for key in STATES if config.get(key)), "")
    if model_type in _UNCOUNTED or others or state:
        what = f"layers of type {others[0][:100]}" if others else f"layers with {state}" if state else "layers"
        label = model_type or "the model"
        raise ShapeError(
            f"{label} has {what} whose parameters are not counted here; work it out by hand, or use another model"
        )


def _linear(config: Mapping[str, Any], layers: int) -> Linear:
    given = config.get("layer_types")
    period = _number(config, "full_attention_interval", 4)
    number = given.count(_LINEAR) if isinstance(given, list) else layers - layers // period
    heads, value_heads = _number(config, "linear_num_key_heads"), _number(config, "linear_num_value_heads")
    return Linear(
        layers=number,
        key_width=heads * _number(config, "linear_key_head_dim"),
        value_width=value_heads * _number(config, "linear_value_head_dim"),
        value_heads=value_heads,
        kernel=_number(config, "linear_conv_kernel_dim"),
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

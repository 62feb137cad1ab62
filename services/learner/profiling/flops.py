"""The floating-point operations of a model per token, estimated from its shapes; and devices' peaks. No torch.

    forward(sequence of L tokens) = 2 N_active L + 2 L^2 heads head_dim layers        training = 3 forward

N_active are the weights that multiply a token: all but the input embedding, and only the chosen ones of a mixture's experts.
The second term is causal attention, two products of L^2 / 2 pairs each. Backward is twice the forward. The recomputation
of checkpointed activations is not counted: these are the usual "model FLOPs" of MFU. A beginning that sequences share counts
for each of them, although it is computed once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from gspo.moe.mixture import mixture_of

PEAK_TFLOPS: Final[Mapping[str, float]] = {"A100": 312.0, "H100": 989.0, "H200": 989.0, "GH200": 989.0, "B200": 2250.0}
"""Dense bfloat16, by a part of the device's name; from NVIDIA's data sheets, SXM form factor."""


def peak_tflops(device_name: str) -> float | None:
    """Return the peak of a device in bfloat16; None: not known."""
    # The longest name first: "GH200" contains "H200".
    found = [name for name in sorted(PEAK_TFLOPS, key=len, reverse=True) if name in device_name]
    return PEAK_TFLOPS[found[0]] if found else None


@dataclass(frozen=True)
class ModelCost:
    """The cost of one token in a forward pass."""

    active_parameters: int
    attention_width: int
    """heads x head_dim x layers."""

    def forward(self, lengths: Iterable[int]) -> float:
        """Operations of one forward pass over sequences of these lengths."""
        return sum(2.0 * self.active_parameters * length + 2.0 * self.attention_width * length**2 for length in lengths)


def model_cost(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> ModelCost:
    """Return the cost of a Hugging Face causal language model.

    Args:
        shapes: the shapes of its whole parameters by name, experts stacked or one by one.
        config: the content of its config.json.
    """
    mixture = mixture_of(config)
    share = mixture.chosen / mixture.experts if mixture else 1.0
    tied = not any(name.endswith("lm_head.weight") for name in shapes)
    active = 0.0
    for name, shape in shapes.items():
        if "embed_tokens" in name and not tied:
            continue
        active += prod(shape) * (share if ".experts." in name else 1.0)
    heads = int(config.get("num_attention_heads") or 0)
    head_dim = int(config.get("head_dim") or (int(config["hidden_size"]) // heads if heads else 0))
    return ModelCost(round(active), heads * head_dim * int(config["num_hidden_layers"]))

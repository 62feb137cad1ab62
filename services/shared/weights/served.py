"""Models that SGLang 0.5.23 does not compute as their config.json says, found by comparison with transformers and reading.

Their weights would be verified bit by bit, but every answer would come from another policy than the learner trains.
"""

from collections.abc import Mapping
from typing import Any, Final

IGNORED_WINDOWS: Final = ("mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Model types whose classes in SGLang attend to all tokens, also in layers with a window. Those of Gemma have windows."""
_NOT_ON_A_CPU: Final = {
    "gemma2": "its capped logits are a kernel for GPUs",
    "gpt_oss": "its attention sinks need a kernel for GPUs",
    "qwen3_next": "its linear attention is a kernel for GPUs",
    "qwen3_5_text": "its linear attention is a kernel for GPUs",
    "qwen3_5_moe_text": "its linear attention is a kernel for GPUs",
}


class ServedError(ValueError):
    """SGLang would serve another policy, or nothing; the text names the value and what to do."""


def require_served(config: Mapping[str, Any], longest: int, *, on_cpu: bool) -> None:
    """Check that SGLang computes what this config.json says, in sequences of at most ``longest`` tokens.

    Raises: ServedError.
    """
    kind = str(config.get("model_type"))
    if on_cpu and kind in _NOT_ON_A_CPU:
        raise ServedError(
            f"a model of type {kind} on a CPU: SGLang does not serve it there, {_NOT_ON_A_CPU[kind]}; use a GPU or another "
            "model"
        )
    window = _window(config)
    if kind in IGNORED_WINDOWS and window is not None and window < longest:
        raise ServedError(
            f"a model of type {kind} with a window of {window:,} tokens (sliding_window), and sequences of up to "
            f"{longest:,} tokens (sampling.max_tokens): SGLang would attend to all of them, and the learner to "
            f"{window:,}; lower sampling.max_tokens to at most {window}, or take a model without windows"
        )


def _window(config: Mapping[str, Any]) -> int | None:
    """Return the window of some layers in tokens; None: none has one."""
    window = config.get("sliding_window")
    if not isinstance(window, int) or isinstance(window, bool):
        return None
    layers = config.get("layer_types")
    if isinstance(layers, list):
        return window if "sliding_attention" in layers else None
    if "use_sliding_window" in config and not config["use_sliding_window"]:
        return None
    # In the Qwen families the layers from this one on have the window.
    first, layers_in_all = config.get("max_window_layers"), config.get("num_hidden_layers")
    if isinstance(first, int) and isinstance(layers_in_all, int) and first >= layers_in_all:
        return None
    return window

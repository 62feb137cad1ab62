"""Models that SGLang 0.5.23 does not compute as their config.json says, found by comparison with transformers and reading.

Their weights would be verified bit by bit, but every answer would come from another policy than the learner trains.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from gspo.moe.mixture import mixture_of
from gspo_protocol.messages.experts import MAX_BYTES, ModelExperts
from gspo_services.shared.settings import Settings

IGNORED_WINDOWS: Final = ("mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Model types whose classes in SGLang attend to all tokens, also in layers with a window. Those of Gemma have windows."""
IGNORED_TIES: Final = ("glm4_moe", "gpt_oss", "minimax_m2", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next")
"""Model types whose classes in SGLang have an output layer of their own whatever config.json says of it."""
_NOT_ON_A_CPU: Final = {"gemma2": "its capped logits are a kernel for GPUs"}

_HEADS: Final = (64, 128, 256, 512)
"""The sizes of a head that SGLang's rotary kernel for CUDA has. Others go through one that cannot fill the cache as well."""
_FILLS_THE_CACHE: Final = ("qwen3_moe",)
"""Model types whose classes ask the rotary kernel to fill the cache, in bfloat16."""


class ServedError(ValueError):
    """SGLang would serve another policy, or nothing; the text names the value and what to do."""


def require_servable(config: Mapping[str, Any], settings: Settings, *, device: Literal["cpu", "cuda"] | None) -> None:
    """Check that SGLang computes this config.json as a run with these settings needs it.

    ``device``: where the server is started; None: somebody else starts it, and knows.
    Raises: ServedError.
    """
    require_served(config, settings.largest_sampling.max_tokens, on_cpu=device == "cpu")
    if device == "cuda":
        require_served_on_cuda(config, settings.model.dtype, settings.rollout.server_args)


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
    if kind in IGNORED_TIES and config.get("tie_word_embeddings") is True:
        raise ServedError(
            f"a model of type {kind} whose output layer is its embedding (tie_word_embeddings): SGLang's class has one of "
            "its own, which nothing would fill; write it as lm_head.weight and set tie_word_embeddings to false"
        )
    window = _window(config)
    if kind in IGNORED_WINDOWS and window is not None and window < longest:
        raise ServedError(
            f"a model of type {kind} with a window of {window:,} tokens (sliding_window), and sequences of up to "
            f"{longest:,} tokens (sampling.max_tokens): SGLang would attend to all of them, and the learner to "
            f"{window:,}; lower sampling.max_tokens to at most {window}, or take a model without windows"
        )


def require_served_on_cuda(config: Mapping[str, Any], dtype: str, server_args: Sequence[str]) -> None:
    """Check that SGLang's kernels for CUDA compute a model in this dtype. Both were seen with SGLang 0.5.23 on an H100.

    ``server_args``: whoever sets --dtype there knows what they want.
    Raises: ServedError.
    """
    if any(argument == "--dtype" or argument.startswith("--dtype=") for argument in server_args):
        return
    on_a_cpu = "or start the run with CUDA_VISIBLE_DEVICES= to stay on the CPU"
    if dtype == "float32":
        raise ServedError(
            "model.dtype is float32, and SGLang's kernels for CUDA know bfloat16 and float16 only; set model.dtype and "
            f'learner.dtype to "bfloat16", {on_a_cpu}'
        )
    size = config.get("head_dim")
    if config.get("model_type") in _FILLS_THE_CACHE and isinstance(size, int) and size not in _HEADS:
        raise ServedError(
            f"head_dim is {size}, and SGLang's kernels for CUDA serve this architecture with heads of "
            f"{', '.join(map(str, _HEADS))}; take another model (gspo model tiny --for-gpu makes one), {on_a_cpu}"
        )


def reported_experts(config: Mapping[str, Any]) -> ModelExperts:
    """Return the choices that SGLang reports of a token of this config.json (objective.routing_replay_from = "engine").

    Raises: ServedError for a dense model, and for one whose choices cannot be told apart or have no room in messages.
    """
    try:
        num_layers, mixture = _number(config, "num_hidden_layers"), mixture_of(config)
    except ValueError as error:
        raise ServedError(str(error)) from error
    if not (mixture and num_layers):
        raise ServedError(
            f"a {config.get('model_type', 'model of unknown type')} model has no experts for an engine to report; set "
            "objective.routing_replay = false"
        )
    from_learner = 'set objective.routing_replay_from = "learner"'
    num_layers -= len(mixture.dense_layers)
    experts = ModelExperts(num_layers, mixture.chosen, mixture.experts)
    if not experts.is_encodable:
        raise ServedError(
            f"{mixture.chosen} of {mixture.experts} experts in {num_layers} layers take {experts.token_bytes} bytes a "
            f"token, {MAX_BYTES} allowed (MAX_EXPERT_BYTES); {from_learner}"
        )
    return experts


def _number(config: Mapping[str, Any], name: str) -> int:
    """Return the number that config.json has; 0: none."""
    value = config.get(name)
    return value if isinstance(value, int) and value > 0 else 0


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

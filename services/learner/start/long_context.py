"""Decides, before anything is loaded, how long a sequence may be and whether ranks can share its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gspo.model_files.configuration import CONVOLVED_BETWEEN, STATES
from gspo_services.shared.settings import Settings

LINEAR_ATTENTION: Final = "linear_attention"
TRAINED_LAYERS: Final = frozenset({"full_attention", "sliding_attention", LINEAR_ATTENTION})
"""The types of layers that the learner accepts: see ``gspo.model.policy``."""

PADDED_FAMILIES: Final = ("olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
"""Model types whose layers with a state get each sequence in a row of its own: see ``gspo.model.linear_attention``."""


def require_apart(model_config: Mapping[str, Any]) -> None:
    """Raises: ValueError for a model with layers that would carry a state from one packed sequence into the next."""
    kind = str(model_config.get("model_type", ""))
    if kind in PADDED_FAMILIES:
        return
    key = next((key for key in STATES if model_config.get(key)), None)
    layers = model_config.get("layer_types")
    if layers is None and model_config.get(CONVOLVED_BETWEEN):
        key = CONVOLVED_BETWEEN
    if key is None and not (isinstance(layers, list) and LINEAR_ATTENTION in layers):
        return
    raise ValueError(
        f"{kind or 'the model'} has layers that carry a state from token to token ({key or LINEAR_ATTENTION}), and would "
        f"carry it from one sequence into the next; use another model: of this kind {', '.join(PADDED_FAMILIES)} are trained"
    )


def require_sequence_parallel(
    model_config: Mapping[str, Any], size: int, *, num_ranks: int, load_balance: bool = False
) -> None:
    """Raises: ValueError, which names the value and what to do, when ``size`` ranks cannot share a sequence's tokens.

    ``model_config``: the model's config.json, or ``config.to_dict()``.
    """
    if size == 1:
        return
    heads = int(model_config.get("num_attention_heads") or 0)
    keys = int(model_config.get("num_key_value_heads") or heads)
    if size > num_ranks:
        raise ValueError(
            f"sequence_parallel is {size} and there are {num_ranks} ranks, which cannot share a sequence; use at most "
            f"{num_ranks}, or more ranks (learner.num_ranks)"
        )
    for what, number in (("the number of ranks", num_ranks), ("the model's attention heads", heads)):
        if number % size:
            raise ValueError(
                f"sequence_parallel is {size}, which does not divide {what} ({number}); use one of "
                f"{_fitting(num_ranks, heads, keys)}"
            )
    if keys % size and size % keys:
        raise ValueError(
            f"sequence_parallel is {size} and the model has {keys} key heads, which neither divide it nor are divided "
            f"by it; use one of {_fitting(num_ranks, heads, keys)}"
        )
    if LINEAR_ATTENTION in (model_config.get("layer_types") or ()):
        raise ValueError(
            f"sequence_parallel is {size} and the model has layers of {LINEAR_ATTENTION}, which carry a state from token to "
            "token; use sequence_parallel = 1"
        )
    if load_balance:
        raise ValueError(
            f"load_balance_coefficient is above 0 and sequence_parallel is {size}: the loss needs all tokens of a "
            "micro-batch on one rank; set objective.load_balance_coefficient = 0, or use sequence_parallel = 1"
        )


def _fitting(num_ranks: int, heads: int, keys: int) -> str:
    sizes = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0 and heads % size == 0]
    return ", ".join(str(size) for size in sizes if keys % size == 0 or size % keys == 0)


def position_limit(model_config: Mapping[str, Any]) -> int | None:
    """Return the longest sequence that the model's positions allow; None: its configuration names no limit.

    Scaled rotary positions stretch it. Where the configuration says how many positions the model was first trained with, the
    limit is ``factor`` times as many, or ``max_position_embeddings`` if that is more; where it does not, ``factor`` times
    ``max_position_embeddings``.
    """
    limit = model_config.get("max_position_embeddings")
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        return None
    scaling = model_config.get("rope_scaling") or model_config.get("rope_parameters")
    if not isinstance(scaling, Mapping):
        return limit
    factor, before = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    if not isinstance(factor, int | float):
        return limit
    return max(limit, int(factor * (before if isinstance(before, int) else limit)))


def require_positions(model_config: Mapping[str, Any], settings: Settings) -> None:
    """Raises: ValueError when a sequence of the run can be longer than the model's positions allow."""
    limit, wanted = position_limit(model_config), settings.largest_sampling.max_tokens
    if limit is not None and wanted > limit:
        raise ValueError(
            f"sequences may have {wanted:,} tokens, prompt and answer together (sampling.max_tokens, schedule.max_tokens), "
            f"but the model has {limit:,} positions (max_position_embeddings); lower it to at most {limit}, or use a model "
            "with more positions, such as one whose rope_scaling stretches them"
        )

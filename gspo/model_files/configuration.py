"""config.json as it is read here, by learner, rollouts, checks and exports alike; what of it is refused whatever the model.

Code that a model's directory brings along (``auto_map``) is never executed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from gspo.model_files.text_model import text_model_of

READ_AS: Final[Mapping[str, str]] = {"kimi_k2": "deepseek_v3"}
"""Model types that are another one's under a name of their own: its layers, and its tensors. With their own names
transformers would leave experts random."""
DEQUANTISED: Final = ("fp8", "mxfp4", "compressed-tensors")
"""Values of ``quant_method`` that ``gspo model dequantise`` knows."""

STATES: Final = (
    *("mamba_d_state", "mamba_num_heads", "ssm_state_size", "state_size", "hybrid_override_pattern"),
    *("conv1d_width", "linear_attn_config", "linear_num_heads"),
)
"""Keys of models with Mamba's layers, recurrent ones, or Kimi's."""

CONVOLVED_BETWEEN: Final = "full_attn_idxs"
"""With which LFM2 says which layers are no convolutions, where it has no list of their types."""


def read_config(directory: Path) -> dict[str, Any]:
    """Read a model's config.json: that of its text model (``text_model_of``), with the model type of ``READ_AS``.

    Raises: ValueError when it is missing or no object, or when its text model cannot be trained.
    """
    return dict(text_model_of(read_whole(directory)).config)


def read_whole(directory: Path) -> dict[str, Any]:
    """Read it as it stands, but for the model type. Raises: ValueError when it is missing or no object."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}; give the directory of a Hugging Face model") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}, not a model's configuration")
    kind = config.get("model_type")
    return config | {"model_type": READ_AS[kind]} if isinstance(kind, str) and kind in READ_AS else config


def require_unquantised(config: Mapping[str, Any]) -> None:
    """Raises: ValueError for a model whose weights are quantised, which get no gradient."""
    quantised = config.get("quantization_config")
    if not quantised:
        return
    method = str(quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised)[:50]
    known = method in DEQUANTISED
    raise ValueError(
        f"its weights are quantised (quantization_config: {method}), and get no gradient; "
        + ("`gspo model dequantise DIR NEW` writes them in bfloat16" if known else "take the unquantised model")
    )

"""The losses of ``gspo.token_losses`` by name: what each needs, and its options. Without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

GIVEN: Final[Mapping[str, tuple[str, ...]]] = {
    "cross_entropy": ("weights",),
    **dict.fromkeys(("importance_sampling", "ppo", "cispo", "dro", "gspo"), ("logprobs", "advantages")),
}
"""The losses, and what each needs beside log-probs: a value for each."""
MASK: Final = "sequence_ratio_mask"
"""What gspo may have: its mean is over the tokens where this is not 0. Without it, where ``logprobs`` is not 0, for clients
write 0 for the tokens that nobody sampled."""
BOUNDS: Final = ("clip_low_threshold", "clip_high_threshold")
BETA: Final = "beta"
DEFAULT_BOUNDS: Final = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0), "gspo": (1 - 3e-4, 1 + 4e-4)}
DEFAULT_BETA: Final = 0.05


def require_token_loss(name: str, options: Mapping[str, object]) -> None:
    """Check a loss's name and options before any tensor is made. Raises: ValueError with what there is."""
    if name not in GIVEN:
        formula = "its formula is not public; " if name == "stable_reinforce" else ""
        raise ValueError(f"loss_fn is {name!r}: {formula}choose one by the argument loss_fn of: {', '.join(GIVEN)}")
    known = BOUNDS if name in DEFAULT_BOUNDS else (BETA,) if name == "dro" else ()
    for key, value in options.items():
        if key not in known:
            raise ValueError(f"loss_fn_config has {key!r}, which {name} does not; it has {', '.join(known) or 'no options'}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value >= 0):
            raise ValueError(f"loss_fn_config: {key} is {value!r}; give a finite number of at least 0")
    low, high = (options.get(key, default) for key, default in zip(BOUNDS, DEFAULT_BOUNDS.get(name, (0, 0)), strict=True))
    if low > high:  # type: ignore[operator]
        raise ValueError(f"loss_fn_config: {BOUNDS[0]} is {low} and {BOUNDS[1]} is {high}; the first must not be larger")


def optional_inputs(name: str) -> tuple[str, ...]:
    """What a sequence may also have for this loss, a value for each token: the bounds may differ by token."""
    return (*(BOUNDS if name in DEFAULT_BOUNDS else ()), *((MASK,) if name == "gspo" else ()))

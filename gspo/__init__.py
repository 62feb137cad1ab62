"""GSPO-token for anybody's trainer: loss, ratio units, staleness band, advantages and diagnostics.

`import gspo` is cheap; torch is imported with the first name that needs it.

    from gspo import Objective, objective_loss
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from gspo.settings import Anchor, MismatchMode, Objective, RatioUnit

if TYPE_CHECKING:
    from gspo.adaptive import AdaptiveClip
    from gspo.advantages import group_advantages, sequence_values_to_tokens, turn_advantages, turn_values_to_tokens
    from gspo.diagnostics import SequenceStats, summarise
    from gspo.loss import LossOutput, gspo_loss, objective_loss
    from gspo.staleness import (
        ClipRange,
        MismatchMoments,
        MismatchTracker,
        clip_range,
        mismatch_moments,
        mismatch_weights,
        objective_clip_range,
        sequence_lag,
    )

__all__ = [
    "AdaptiveClip",
    "Anchor",
    "ClipRange",
    "LossOutput",
    "MismatchMode",
    "MismatchMoments",
    "MismatchTracker",
    "Objective",
    "RatioUnit",
    "SequenceStats",
    "clip_range",
    "group_advantages",
    "gspo_loss",
    "mismatch_moments",
    "mismatch_weights",
    "objective_clip_range",
    "objective_loss",
    "sequence_lag",
    "sequence_values_to_tokens",
    "summarise",
    "turn_advantages",
    "turn_values_to_tokens",
]

_MODULE_OF = {
    "AdaptiveClip": "adaptive",
    "ClipRange": "staleness",
    "LossOutput": "loss",
    "MismatchMoments": "staleness",
    "MismatchTracker": "staleness",
    "SequenceStats": "diagnostics",
    "clip_range": "staleness",
    "group_advantages": "advantages",
    "gspo_loss": "loss",
    "mismatch_moments": "staleness",
    "mismatch_weights": "staleness",
    "objective_clip_range": "staleness",
    "objective_loss": "loss",
    "sequence_lag": "staleness",
    "sequence_values_to_tokens": "advantages",
    "summarise": "diagnostics",
    "turn_advantages": "advantages",
    "turn_values_to_tokens": "advantages",
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'gspo' has no attribute {name!r}")
    return getattr(import_module(f"gspo.{_MODULE_OF[name]}"), name)

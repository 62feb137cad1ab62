"""GSPO-token for any trainer: loss, ratio units, staleness-aware clip range, advantages and diagnostics.

``import gspo`` is cheap; the first name that needs torch imports it. ``gspo.model`` and ``gspo.moe`` hold what a learner of
Hugging Face models needs besides.

    from gspo import Objective, objective_loss
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from gspo.moved import MOVED, report_moves
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

_LAZY_MODULES = ("adaptive", "advantages", "diagnostics", "staleness", "loss")

report_moves(__name__, MOVED)


def __getattr__(name: str) -> object:
    if name in __all__:
        for module in _LAZY_MODULES:
            defined = vars(import_module(f"gspo.{module}"))
            if name in defined:
                return defined[name]
    raise AttributeError(f"module 'gspo' has no attribute {name!r}")

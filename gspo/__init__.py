"""GSPO-token for any trainer: loss, ratio units, staleness-aware clip range, advantages and diagnostics.

``import gspo`` is cheap; a name that needs torch imports its module when it is first used. ``gspo.model`` and ``gspo.moe``
hold what a learner of Hugging Face models needs besides; their names for training loops are here too. ``gspo.tasks`` is a
separate package: users import it for environments and agents.

    from gspo import Objective, objective_loss, padded_loss
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from gspo.settings import Aggregation, Anchor, ClipCalibration, KlEstimator, Objective, RatioUnit, Surrogate, TisMode

if TYPE_CHECKING:
    from gspo.adaptive import AdaptiveClip
    from gspo.advantages import group_advantages, sequence_values_to_tokens, turn_advantages, turn_values_to_tokens
    from gspo.calibration import Calibration, LagCalibration, Measured
    from gspo.diagnostics import SequenceStats, signal_clip_fraction, summarise
    from gspo.loss import LossOutput, TokenRatios, gspo_loss, objective_loss
    from gspo.mismatch import MismatchMoments, MismatchTracker, mismatch_moments, mismatch_weights, sequence_mismatch
    from gspo.model.logprobs import TokenLogProbs, attach_logprob_head, chunked_logprobs
    from gspo.model.micro_batches import plan_micro_batches
    from gspo.model.packing import PackedBatch, TrainGroup, TrainSequence, pack
    from gspo.moe.experts import ExpertPicks, ExpertRecorder
    from gspo.moe.routing_replay import RoutingReplay
    from gspo.options.aggregation import Reduction
    from gspo.options.distillation import teacher_advantages
    from gspo.options.ess_rate import ess_rate_scale
    from gspo.options.penalties import sequence_kl
    from gspo.padded import padded_loss
    from gspo.staleness import ClipRange, calibrated_clip_range, clip_range, objective_clip_range, sequence_lag

__all__ = [
    "AdaptiveClip",
    "Aggregation",
    "Anchor",
    "Calibration",
    "ClipCalibration",
    "ClipRange",
    "ExpertPicks",
    "ExpertRecorder",
    "KlEstimator",
    "LagCalibration",
    "LossOutput",
    "Measured",
    "MismatchMoments",
    "MismatchTracker",
    "Objective",
    "PackedBatch",
    "RatioUnit",
    "Reduction",
    "RoutingReplay",
    "SequenceStats",
    "Surrogate",
    "TisMode",
    "TokenLogProbs",
    "TokenRatios",
    "TrainGroup",
    "TrainSequence",
    "attach_logprob_head",
    "calibrated_clip_range",
    "chunked_logprobs",
    "clip_range",
    "ess_rate_scale",
    "group_advantages",
    "gspo_loss",
    "mismatch_moments",
    "mismatch_weights",
    "objective_clip_range",
    "objective_loss",
    "pack",
    "padded_loss",
    "plan_micro_batches",
    "sequence_kl",
    "sequence_lag",
    "sequence_mismatch",
    "sequence_values_to_tokens",
    "signal_clip_fraction",
    "summarise",
    "teacher_advantages",
    "turn_advantages",
    "turn_values_to_tokens",
]

_LAZY = {
    "adaptive": ("AdaptiveClip",),
    "options.aggregation": ("Reduction",),
    "calibration": ("Calibration", "LagCalibration", "Measured"),
    "advantages": ("group_advantages", "sequence_values_to_tokens", "turn_advantages", "turn_values_to_tokens"),
    "diagnostics": ("SequenceStats", "signal_clip_fraction", "summarise"),
    "loss": ("LossOutput", "TokenRatios", "gspo_loss", "objective_loss"),
    "model.logprobs": ("TokenLogProbs", "attach_logprob_head", "chunked_logprobs"),
    "model.micro_batches": ("plan_micro_batches",),
    "model.packing": ("PackedBatch", "TrainGroup", "TrainSequence", "pack"),
    "moe.experts": ("ExpertPicks", "ExpertRecorder"),
    "moe.routing_replay": ("RoutingReplay",),
    "padded": ("padded_loss",),
    "options.distillation": ("teacher_advantages",),
    "options.ess_rate": ("ess_rate_scale",),
    "options.penalties": ("sequence_kl",),
    "mismatch": ("MismatchMoments", "MismatchTracker", "mismatch_moments", "mismatch_weights", "sequence_mismatch"),
    "staleness": ("ClipRange", "calibrated_clip_range", "clip_range", "objective_clip_range", "sequence_lag"),
}
_MODULE_OF = {name: module for module, names in _LAZY.items() for name in names}


def __getattr__(name: str) -> object:
    if name in _MODULE_OF:
        return getattr(import_module(f"gspo.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module 'gspo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

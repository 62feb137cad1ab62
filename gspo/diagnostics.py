"""Statistics of the loss per sequence, and their summary by lag and by the sign of the advantage.

Raw columns are merged over micro-batches and ranks and summarised once: quantiles of quantiles are not quantiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

LAG_BUCKETS: tuple[tuple[str, float], ...] = (
    ("lag_0", 0.0),
    ("lag_1", 1.0),
    ("lag_2", 2.0),
    ("lag_3_4", 4.0),
    ("lag_5_up", float("inf")),
)
"""Name and largest lag. A lag is a mean over tokens: the current version made all of lag_0, and lag_1 is (0, 1]."""

RATIO_QUANTILES: tuple[tuple[str, float], ...] = (("p01", 0.01), ("p50", 0.5), ("p99", 0.99))

POSITIVE, NEGATIVE = "advantage_positive", "advantage_negative"
"""Buckets by the sign of a sequence's mean advantage; a mean of 0 is in neither. Only one bound can clip a given sign, so
fractions over both signs hide up to half of the clipping."""

UNKNOWN_GROUP = -1.0


@dataclass(frozen=True)
class SequenceStats:
    """One row per sequence, without gradient; NaN means "not measured" and never reaches a summary."""

    num_tokens_S: Tensor
    """Action tokens, before any rejection."""
    lag_S: Tensor
    advantage_S: Tensor
    """Mean advantage over the action tokens, before mismatch weights."""
    objective_S: Tensor
    """The sequence's part of J, times N."""
    log_ratio_S: Tensor
    """Mean log-ratio over the sequence's action tokens, clamped, whatever the ratio unit."""
    log_ratio_error_S: Tensor
    """Standard error of log_ratio_S: the deviation of the log-ratios in the sequence, by the root of its length."""
    clipped_high_S: Tensor
    """Fraction of the action tokens whose gradient the upper bound removed (positive advantage). CISPO: that were capped.
    SAPO: of the gradient that its gate removed there. DPPO and M2PO: that were masked above."""
    clipped_low_S: Tensor
    """The same of the lower bound (negative advantage). CISPO: 0."""
    clip_low_S: Tensor
    """Lower bound of the log-ratio, nats; the mean over the action tokens. NaN where the surrogate has none."""
    clip_high_S: Tensor
    """Upper bound of the log-ratio, like ``clip_low_S``."""
    clip_capped_S: Tensor
    """Fraction of the action tokens whose clip range would be wider without its ceiling (``clip_calibration_cap``)."""
    dual_clipped_S: Tensor
    """Fraction of the action tokens whose gradient the dual clip removed (negative advantage)."""
    masked_S: Tensor
    """Fraction of the action tokens whose own mismatch weight is 0 (IcePop)."""
    clamped_tokens_S: Tensor
    """Number of action tokens in units whose log-ratio was clamped."""
    zero_advantage_S: Tensor
    """1 where every action token has advantage 0, before mismatch weights."""
    weight_S: Tensor
    """Mismatch weight; 1 without."""
    rejected_S: Tensor
    """1 where the mismatch weight is 0."""
    mismatch_kl_S: Tensor
    """Nats per token, learner against engine; NaN if not measured."""
    mismatch_S: Tensor
    """Mean of learner minus engine log-prob, nats; NaN if not measured."""
    mismatch_variance_S: Tensor
    """Variance of a token's learner minus engine log-prob about that mean, nats squared; NaN if not measured."""
    reference_kl_S: Tensor
    """Nats per token, learner against the reference model; NaN if not measured."""
    teacher_kl_S: Tensor
    """Nats per token, engine against the teacher; NaN if not measured."""
    entropy_S: Tensor
    """Nats per token; NaN if not measured."""
    group_S: Tensor
    """Group of the sequence, any integer below 2**53; -1 if unknown."""

    def as_matrix(self) -> Tensor:
        """Return float64 [S, columns], in field order; ranks gather it from each other."""
        return torch.stack([getattr(self, field.name).double() for field in fields(self)], dim=1)

    @classmethod
    def from_matrix(cls, matrix: Tensor) -> SequenceStats:
        """Invert ``as_matrix`` (columns stay float64). Raises: ValueError for another number of columns."""
        if matrix.dim() != 2 or matrix.shape[1] != len(fields(cls)):
            raise ValueError(f"matrix has shape {tuple(matrix.shape)}; give [sequences, {len(fields(cls))}]")
        return cls(*matrix.double().unbind(dim=1))

    @classmethod
    def merge(cls, parts: Sequence[SequenceStats]) -> SequenceStats:
        """Concatenate the rows of several micro-batches or ranks."""
        if not parts:
            return cls.from_matrix(torch.zeros(0, len(fields(cls)), dtype=torch.float64))
        return cls.from_matrix(torch.cat([part.as_matrix() for part in parts]))


def summarise(stats: SequenceStats) -> dict[str, float]:
    """Return finite numbers by "name/<bucket>"; what was not measured, and a bound that is infinite, has no key.

    Buckets: all, those of LAG_BUCKETS, advantage_positive and advantage_negative (signs of the mean advantage).
    ``zero_advantage_groups`` counts groups in which every member's advantages are all 0.
    Sequences without action tokens are counted in ``sequences_empty/all`` and appear nowhere else.
    Every mean is over sequences (divided by their number in the bucket), as in the loss.
    """
    matrix = stats.as_matrix().cpu()
    columns = SequenceStats.from_matrix(matrix)
    present = columns.num_tokens_S > 0
    summary = {"sequences_empty/all": float((~present).sum())}
    summary |= _bucket_summary(SequenceStats.from_matrix(matrix[present]), "all")
    low = -1.0
    for name, high in LAG_BUCKETS:
        chosen = present & (columns.lag_S > low) & (columns.lag_S <= high)
        summary |= _bucket_summary(SequenceStats.from_matrix(matrix[chosen]), name)
        low = high
    for name, chosen in ((POSITIVE, columns.advantage_S > 0), (NEGATIVE, columns.advantage_S < 0)):
        summary |= _bucket_summary(SequenceStats.from_matrix(matrix[present & chosen]), name)
    return summary


def signal_clip_fraction(summary: Mapping[str, float]) -> float | None:
    """Return the clip fraction over the sequences that have a signal, for ``AdaptiveClip``; None if no sequence has one.

    summary: from ``summarise``. A sequence has a signal if it has an advantage and is not rejected. The others are never
    clipped: their share would narrow the clip range.
    """
    num_with_signal = summary.get("signal_sequences/all", 0.0)
    if num_with_signal == 0:
        return None
    return min(1.0, summary["clip_fraction/all"] * summary["sequences/all"] / num_with_signal)


def effective_sample_size(weights_S: Tensor) -> float:
    """Kish's (sum w)^2 / sum w^2 (Survey Sampling, 1965) as a fraction of the number of weights, in [0, 1].

    0 if every weight is 0.
    """
    largest = float(weights_S.max()) if weights_S.numel() else 0.0
    if largest == 0:
        return 0.0
    # A fraction does not depend on the unit, and the squares of weights of any size may have no number.
    weights_S = weights_S / largest
    squares = float(weights_S.square().sum())
    return float(weights_S.sum()) ** 2 / squares / weights_S.shape[0]


def _bucket_summary(stats: SequenceStats, bucket: str) -> dict[str, float]:
    summary = {f"sequences/{bucket}": float(stats.num_tokens_S.shape[0])}
    if stats.num_tokens_S.shape[0] == 0:
        return summary
    ratio_S = stats.log_ratio_S.exp()
    values = {
        "tokens": float(stats.num_tokens_S.sum()),
        "lag": float(stats.lag_S.mean()),
        "advantage": float(stats.advantage_S.mean()),
        "objective": float(stats.objective_S.mean()),
        "clip_fraction_high": float(stats.clipped_high_S.mean()),
        "clip_fraction_low": float(stats.clipped_low_S.mean()),
        "clip_fraction_dual": float(stats.dual_clipped_S.mean()),
        "clip_fraction": float((stats.clipped_high_S + stats.clipped_low_S).mean()),
        "mask_fraction": float(stats.masked_S.mean()),
        "clip_capped": float(stats.clip_capped_S.mean()),
        "ratio_mean": float(ratio_S.mean()),
        "ratio_min": float(ratio_S.min()),
        "ratio_max": float(ratio_S.max()),
        "effective_sample_size": effective_sample_size(ratio_S * stats.weight_S),
        "mismatch_weight": float(stats.weight_S.mean()),
        "log_ratio_error": float(stats.log_ratio_error_S.mean()),
        "rejected_sequences": float(stats.rejected_S.sum()),
        "clamped_tokens": float(stats.clamped_tokens_S.sum()),
        "zero_advantage_sequences": float(stats.zero_advantage_S.sum()),
        "signal_sequences": float(((stats.zero_advantage_S == 0) & (stats.weight_S > 0)).sum()),
    }
    for name, quantile in RATIO_QUANTILES:
        values[f"ratio_{name}"] = float(torch.quantile(ratio_S, quantile))
    measurements = {
        "clip_range_low": stats.clip_low_S,
        "clip_range_high": stats.clip_high_S,
        "mismatch_kl": stats.mismatch_kl_S,
        "mismatch": stats.mismatch_S,
        "reference_kl": stats.reference_kl_S,
        "teacher_kl": stats.teacher_kl_S,
        "entropy": stats.entropy_S,
    }
    for name, column in measurements.items():
        measured = column[column.isfinite()]
        if measured.shape[0]:
            values[name] = float(measured.mean())
    groups = stats.group_S.unique()
    known = groups[groups != UNKNOWN_GROUP]
    if known.shape[0]:
        alive = stats.group_S[stats.zero_advantage_S == 0].unique()
        values["groups"] = float(known.shape[0])
        values["zero_advantage_groups"] = float((~torch.isin(known, alive)).sum())
    return summary | {f"{name}/{bucket}": value for name, value in values.items()}

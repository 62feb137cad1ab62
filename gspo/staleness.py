"""Staleness and engine noise: sequence lag, and the clip range that widens with both.

Lag is staleness: policy versions between sampling and training. A run bounds it by ``batch.max_lag`` (prime-rl:
max_off_policy_steps, AReaL: max_head_offpolicyness).

The clip range of sequence i with lag d_i, for a unit of n tokens (the whole sequence in GSPO):

    k * g(d_i) * (log(1 - eps_low), log(1 + eps_high))   widened on both sides by   z * sigma / sqrt(n)

    g(d) = 1 + c * d        for c >= 0: every version of lag adds legitimate drift
    g(d) = 1 / (1 + |c| d)  for c < 0:  older sequences are trusted less

With d = 0, sigma = 0 and k = 1 it is the clip of the GSPO paper (arXiv 2507.18071). k is the scale of ``AdaptiveClip``. It
leaves the noise margin alone: the mean of n independent per-token errors of deviation sigma has the deviation
sigma / sqrt(n), whatever the clip.

The calibrated clip range takes both from what was measured for the lag (``gspo.calibration``: variance A between sequences,
variance V of a token) instead of guessing them:

    k * (log(1 - eps_low), log(1 + eps_high))   widened on both sides by   z * sqrt(A(d_i) + V(d_i) / n)

Where nothing has drifted and there is no noise it is the paper's. The widening of a unit of n tokens is at most
cap / sqrt(n), as if each token had an error of its own of that deviation: a range that follows whatever drift it measures is
no brake, because longer steps would only widen it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gspo.calibration import NOTHING_MEASURED, Calibration, require_calibration
from gspo.inputs.units import segment_mean
from gspo.inputs.validation import (
    INTEGER_DTYPES,
    require_finite,
    require_ids,
    require_mask,
    require_not_negative,
    require_precise,
    require_vector,
    values_are_trusted,
)
from gspo.settings import Objective, require_number


def sequence_lag(
    policy_version: int, versions_T: Tensor, mask_T: Tensor, sequence_ids_T: Tensor, num_sequences: int
) -> Tensor:
    """Return lag_S (float32): the mean over a sequence's action tokens of ``policy_version`` minus their version.

    ``versions_T`` (int64) is read at action tokens only; a sequence without any has lag 0.
    Raises: ValueError for a token that is newer than the learner.
    """
    require_vector("versions_T", versions_T)
    require_vector("mask_T", mask_T, versions_T.shape[0])
    require_mask("mask_T", mask_T)
    require_vector("sequence_ids_T", sequence_ids_T, versions_T.shape[0])
    newer = mask_T & (versions_T > policy_version)
    if not values_are_trusted() and bool(newer.any()):
        index = int(torch.nonzero(newer)[0, 0])
        raise ValueError(
            f"versions_T[{index}] is {int(versions_T[index])} but policy_version is {policy_version}: a token cannot be "
            "newer than the learner; versions must never be reused, not even after a restart"
        )
    require_ids("sequence_ids_T", sequence_ids_T, num_sequences, mask_T)
    lag_T = (policy_version - versions_T).to(torch.float32)
    return segment_mean(lag_T, mask_T, torch.where(mask_T, sequence_ids_T, 0), num_sequences)


@dataclass(frozen=True)
class ClipRange:
    """The clip range of each sequence in log space: a drift part per sequence, a noise margin per unit."""

    lag_S: Tensor
    log_lo_S: Tensor
    log_hi_S: Tensor
    noise: float
    """z * sigma, in nats: the margin of one token; a unit of n tokens gets noise / sqrt(n)."""
    measured_S: tuple[Tensor, Tensor] | None = None
    """Instead of ``noise``: z^2 A and z^2 V of each sequence's lag, in nats squared."""
    cap: float = math.inf
    """The most that ``measured_S`` widens a side, in nats for one token; cap / sqrt(n) for a unit of n."""

    def bounds(self, sequence_ids: Tensor, num_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return (log_lo, log_hi) for units of ``num_tokens`` tokens that belong to the sequences ``sequence_ids``."""
        if self.measured_S is None:
            margin = self.noise / num_tokens.clamp(min=1).sqrt()
        else:
            margin = torch.minimum(*self._measured(sequence_ids, num_tokens))
        return self.log_lo_S[sequence_ids] - margin, self.log_hi_S[sequence_ids] + margin

    def is_capped(self, sequence_ids: Tensor, num_tokens: Tensor) -> Tensor:
        """Return where ``cap`` makes the clip range of such units narrower than what was measured (bool)."""
        if self.measured_S is None:
            return torch.zeros_like(sequence_ids, dtype=torch.bool)
        measured, ceiling = self._measured(sequence_ids, num_tokens)
        return measured > ceiling

    def _measured(self, sequence_ids: Tensor, num_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return what was measured, and the ceiling, for each unit."""
        assert self.measured_S is not None
        between_S, token_S = self.measured_S
        num_tokens = num_tokens.clamp(min=1)
        measured = (between_S[sequence_ids] + token_S[sequence_ids] / num_tokens).sqrt()
        return measured, (self.cap / num_tokens.sqrt()).to(measured.dtype)


def clip_range(
    lag_S: Tensor,
    *,
    eps_low: float,
    eps_high: float,
    clip_range_growth: float = 0.0,
    noise_z: float = 0.0,
    sigma: float = 0.0,
    scale: float = 1.0,
) -> ClipRange:
    """Build the clip range of the module docstring; ``clip_range(torch.zeros(S), eps_low=.., eps_high=..)`` is the paper's.

    lag_S: float or integer, in versions, at least 0. clip_range_growth: c; negative tightens. sigma: nats, the deviation of
    one token's engine-versus-learner mismatch. scale: k, above 0.
    Raises: ValueError for a value out of range.
    """
    require_vector("lag_S", lag_S)
    if lag_S.dtype in INTEGER_DTYPES:
        lag_S = lag_S.float()
    require_precise("lag_S", lag_S)
    require_finite("lag_S", lag_S)
    require_not_negative("lag_S", lag_S)
    require_number("eps_low", eps_low, low=0.0, high=1.0, low_open=True)
    require_number("eps_high", eps_high, low=0.0, low_open=True)
    require_number("clip_range_growth", clip_range_growth, low=-math.inf)
    require_number("noise_z", noise_z, low=0.0)
    require_number("sigma", sigma, low=0.0)
    require_number("scale", scale, low=0.0, low_open=True)
    growth_S = 1 + clip_range_growth * lag_S if clip_range_growth >= 0 else 1 / (1 - clip_range_growth * lag_S)
    width_S = scale * growth_S
    return ClipRange(lag_S, width_S * math.log1p(-eps_low), width_S * math.log1p(eps_high), noise_z * sigma)


def calibrated_clip_range(
    lag_S: Tensor,
    calibration: Calibration,
    *,
    eps_low: float,
    eps_high: float,
    z: float = 1.0,
    scale: float = 1.0,
    cap: float = math.inf,
) -> ClipRange:
    """Build the calibrated clip range of the module docstring, from ``LagCalibration.current``.

    z: how many deviations of drift and noise the bounds lie further out. cap: the most that they do for one token,
    in nats; above 0. Raises: ValueError as ``clip_range``.
    """
    if not cap > 0:
        raise ValueError(f"cap is {cap}; give a number above 0, in nats, or infinity for none")
    plain = clip_range(lag_S, eps_low=eps_low, eps_high=eps_high, noise_z=z, scale=scale)
    # In float64, before float32 can make a huge variance infinite: 0 times that is NaN.
    _, between_S, token_S = ((z * z * values).to(plain.log_lo_S.dtype) for values in calibration.at(plain.lag_S))
    return replace(plain, measured_S=(between_S, token_S), cap=cap)


def objective_clip_range(
    objective: Objective, lag_S: Tensor, sigma: float, scale: float = 1.0, calibration: Calibration | None = None
) -> ClipRange:
    """Return the clip range that ``objective`` asks for; ``scale`` comes from its ``AdaptiveClip`` and is 1 without one,
    ``calibration`` from ``LagCalibration.current``. Without a calibration nothing is measured and the clip is the paper's,
    as before a run's first batch; an objective that sets ``clip_calibration`` needs one.

    With the proximal anchor (decoupled PPO, arXiv 2110.00641) the ratio starts at exactly 1 in every batch. It contains
    neither engine noise nor the drift of the versions since sampling (the mismatch weight does), so the clip range is the
    plain one.
    """
    if objective.is_calibrated:
        return calibrated_clip_range(
            lag_S,
            _calibration_of(objective, calibration),
            eps_low=objective.eps_low,
            eps_high=objective.eps_high,
            z=objective.noise_z,
            scale=scale,
            cap=objective.clip_calibration_cap,
        )
    proximal = objective.anchor == "proximal"
    return clip_range(
        lag_S,
        eps_low=objective.eps_low,
        eps_high=objective.eps_high,
        clip_range_growth=0.0 if proximal else objective.clip_range_growth,
        noise_z=0.0 if proximal else objective.noise_z,
        sigma=sigma,
        scale=scale,
    )


def _calibration_of(objective: Objective, calibration: Calibration | None) -> Calibration:
    if calibration is None and objective.clip_calibration is None:
        return NOTHING_MEASURED
    return require_calibration(calibration, f"clip_calibration {objective.clip_calibration!r}")

"""The clip ranges and mismatch weights of a run, with the controls of the calibrated ones.

Two forms are the study's own, because it found nothing for them: bounds shifted by the location of each lag ("recentre"),
and a cap of the mismatch weight for each lag ("truncate_by_lag").

A calibrated clip range is wider for old sequences. It could be better only because it is wider, or only because widths
differ. So two controls have the widths without the reason for them: "matched" gives every sequence of a micro-batch the mean
of their widths, and "shuffled" deals the same widths to its sequences at random.

Two rules are of question m: "total" bounds the log-ratio of a whole answer, n |m_i|, and "tempered" takes VESPO's kernel of
W^power instead of W. There log W has the variance n^2 (A(d) + V(d) / n) before any training on the batch, so that with

    power = min(1, sqrt(ln(1 / TEMPERED_SHARE)) / (n sqrt(A(d) + V(d) / n)))

drift and noise alone leave the weights W^power an effective sample size of at least TEMPERED_SHARE.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Final

import torch
from torch import Tensor

from benchmarks.study.config import RunConfig
from gspo.calibration import Calibration
from gspo.inputs.units import segment_sum
from gspo.mismatch import MAX_LOG_WEIGHT, MismatchWeights, mismatch_weights
from gspo.model.packing import PackedBatch
from gspo.options.surrogates import Ratios, Terms, TermsOf, m2po_clip, vespo
from gspo.staleness import ClipRange, calibrated_clip_range, clip_range

TEMPERED_SHARE: Final = 0.5


def study_clip_range(
    config: RunConfig,
    lag_S: Tensor,
    num_tokens_S: Tensor,
    *,
    sigma: float,
    scale: float,
    calibration: Calibration,
    generator: torch.Generator,
) -> ClipRange:
    """Return the clip range of the run; without clipping its bounds are infinite. ``generator`` deals shuffled widths."""
    if config.clip == "none":
        infinite_S = torch.full_like(lag_S, torch.inf)
        return ClipRange(lag_S, -infinite_S, infinite_S, 0.0)
    if config.clip_form == "total":
        tokens_S = num_tokens_S.clamp(min=1)
        return ClipRange(lag_S, -config.eps_low / tokens_S, config.eps_high / tokens_S, 0.0)
    scale = scale if config.clip == "adaptive" else 1.0
    if config.clip_form == "given":
        proximal = config.anchor == "proximal"
        return clip_range(
            lag_S,
            eps_low=config.eps_low,
            eps_high=config.eps_high,
            clip_range_growth=0.0 if proximal else config.clip_range_growth,
            noise_z=0.0 if proximal else config.noise_z,
            sigma=sigma,
            scale=scale,
        )
    eps = {"eps_low": config.eps_low, "eps_high": config.eps_high}
    cap = math.inf if config.clip_cap is None else config.clip_cap
    measured = calibrated_clip_range(lag_S, calibration, **eps, z=config.noise_z, scale=scale, cap=cap)
    if config.clip_form == "widen":
        return measured
    if config.clip_form == "recentre":
        location_S = calibration.at(measured.lag_S)[0].to(measured.log_lo_S.dtype)
        return replace(measured, log_lo_S=measured.log_lo_S + location_S, log_hi_S=measured.log_hi_S + location_S)
    assert measured.measured_S is not None
    between_S, token_S = measured.measured_S
    width_S = (between_S + token_S / num_tokens_S.clamp(min=1)).sqrt()
    if config.clip_form == "matched":
        width_S = width_S.mean().expand_as(width_S)
    else:
        width_S = width_S[torch.randperm(width_S.shape[0], generator=generator)]
    return replace(measured, measured_S=(width_S.square(), torch.zeros_like(width_S)))


def study_terms(config: RunConfig, lag_S: Tensor, num_tokens_S: Tensor, calibration: Calibration) -> TermsOf | None:
    """Return the terms in the place of the clip's; None for the clip."""
    if config.surrogate == "clip":
        return None
    if config.surrogate == "m2po_clip":
        return partial(m2po_clip, bound=config.m2po_bound)
    if config.surrogate == "vespo":
        return vespo
    power_S = tempering(calibration, lag_S, num_tokens_S)

    def tempered(x: Ratios) -> Terms:
        return vespo(replace(x, log_s_T=x.log_s_T * power_S[x.inputs.sequence_ids_T].to(x.log_s_T.dtype)))

    return tempered


def tempering(calibration: Calibration, lag_S: Tensor, num_tokens_S: Tensor) -> Tensor:
    """Return the power of each sequence's W, float64 [S]; 1 where nothing was measured."""
    _, between_S, token_S = calibration.at(lag_S)
    tokens_S = num_tokens_S.double().clamp(min=1)
    deviation_S = tokens_S * (between_S + token_S / tokens_S).sqrt()
    return (math.sqrt(math.log(1 / TEMPERED_SHARE)) / deviation_S).clamp(max=1.0)


def ordinary_log_weight(calibration: Calibration, lag_S: Tensor, num_tokens_S: Tensor, *, z: float) -> Tensor:
    """Return the largest ordinary log-weight for these lags and lengths, float64 [S]: b(d) + z sqrt(A(d) + V(d) / n).

    With the proximal anchor the log-weight is what ``gspo.calibration`` measures. It is at least 0: a weight of 1 is never
    cut.
    """
    location_S, between_S, token_S = calibration.at(lag_S)
    deviation_S = (between_S + token_S / num_tokens_S.double().clamp(min=1)).sqrt()
    return (location_S + z * deviation_S).clamp(min=0.0, max=MAX_LOG_WEIGHT)


def study_weights(
    config: RunConfig, packed: PackedBatch, start_logprobs_T: Tensor, calibration: Calibration, lag_S: Tensor
) -> MismatchWeights:
    """Return the mismatch weights of a run with the proximal anchor."""
    by_lag = config.mismatch_mode == "truncate_by_lag"
    weights = mismatch_weights(
        start_logprobs_T,
        packed.behaviour_T,
        packed.mask_T,
        packed.sequence_ids_T,
        packed.num_sequences,
        mode="truncate" if config.mismatch_mode == "truncate_by_lag" else config.mismatch_mode,
        cap=math.exp(MAX_LOG_WEIGHT) if by_lag else config.mismatch_cap,
    )
    if by_lag:
        caps_S = ordinary_log_weight(calibration, lag_S, tokens_of(packed), z=config.mismatch_z).exp()
        weights = replace(weights, weights_S=torch.minimum(weights.weights_S, caps_S.to(weights.weights_S.dtype)))
    return weights


def tokens_of(packed: PackedBatch) -> Tensor:
    """Return the action tokens of each sequence, float32 [S]."""
    ids_T = torch.where(packed.mask_T, packed.sequence_ids_T, 0)
    return segment_sum(packed.mask_T.float(), ids_T, packed.num_sequences)

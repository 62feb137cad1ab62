"""The clip ranges and mismatch weights of a run, with the controls of the calibrated ones.

A calibrated clip range is wider for old sequences. It could be better only because it is wider, or only because widths
differ. So two controls have the widths without the reason for them: "matched" gives every sequence of a micro-batch the mean
of their widths, and "shuffled" deals the same widths to its sequences at random.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.study.config import RunConfig
from gspo.calibration import Calibration
from gspo.inputs.units import segment_sum
from gspo.mismatch import MismatchWeights, mismatch_log_cap, mismatch_weights
from gspo.model.packing import PackedBatch
from gspo.staleness import ClipRange, calibrated_clip_range, clip_range


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
    recentre = config.clip_form == "recentre"
    eps = {"eps_low": config.eps_low, "eps_high": config.eps_high}
    measured = calibrated_clip_range(lag_S, calibration, **eps, z=config.noise_z, scale=scale, recentre=recentre)
    if config.clip_form in ("widen", "recentre"):
        return measured
    assert measured.measured_S is not None
    between_S, token_S = measured.measured_S
    width_S = (between_S + token_S / num_tokens_S.clamp(min=1)).sqrt()
    if config.clip_form == "matched":
        width_S = width_S.mean().expand_as(width_S)
    else:
        width_S = width_S[torch.randperm(width_S.shape[0], generator=generator)]
    return replace(measured, measured_S=(width_S.square(), torch.zeros_like(width_S)))


def study_weights(
    config: RunConfig, packed: PackedBatch, start_logprobs_T: Tensor, calibration: Calibration, lag_S: Tensor
) -> MismatchWeights:
    """Return the mismatch weights of a run with the proximal anchor."""
    log_cap_S = None
    if config.mismatch_mode == "truncate_by_lag":
        log_cap_S = mismatch_log_cap(calibration, lag_S, tokens_of(packed), z=config.mismatch_z)
    return mismatch_weights(
        start_logprobs_T,
        packed.behaviour_T,
        packed.mask_T,
        packed.sequence_ids_T,
        packed.num_sequences,
        mode=config.mismatch_mode,
        cap=config.mismatch_cap,
        log_cap_S=log_cap_S,
    )


def tokens_of(packed: PackedBatch) -> Tensor:
    """Return the action tokens of each sequence, float32 [S]."""
    ids_T = torch.where(packed.mask_T, packed.sequence_ids_T, 0)
    return segment_sum(packed.mask_T.float(), ids_T, packed.num_sequences)

"""The GSPO-token loss with staleness-aware clipping, for any ratio unit.

For sequence i with action tokens t in A_i, n_i = |A_i| (GSPO-token: arXiv 2507.18071, section 4.3; sg stops the gradient):

    delta_t = log pi_theta(y_t) - log pi_anchor(y_t)
    log s_u = mean of delta_t over the ratio unit u
    log s_t = (log pi_theta(y_t) - sg[log pi_theta(y_t)]) + sg[log s_u(t)]
    J       = 1/N * sum_i 1/n_i * sum_t min(s_t A_t, clip(s_t, lo_i, hi_i) A_t)     (min and clip: PPO, arXiv 1707.06347)

Unit "sequence" is GSPO-token. Where A_t = A_i it equals GSPO in value, clip decision and gradient. Unit "token" is
GRPO (sequence mean of token terms). N is the number of sequences of the whole optimizer step, over all ranks and
micro-batches, so that the losses of its micro-batches *add up* to the loss of the step, whatever the split.
``gspo.options.aggregation`` has the other divisors, in the place of n_i, and episodes of several sequences.

Tensors are flat over the micro-batch: ``_T`` per target token (index t is the prediction of token t), ``_S`` per sequence,
``_U`` per ratio unit. ``gspo.padded`` takes [S, L] layouts. Nothing is read where the mask is False: NaN may stand there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from gspo.calibration import Calibration
from gspo.diagnostics import UNKNOWN_GROUP, SequenceStats
from gspo.inputs.loss_inputs import LossInputs, loss_inputs
from gspo.inputs.units import segment_mean, segment_sum
from gspo.inputs.validation import require_finite, require_not_negative, require_vector, trusted_values
from gspo.mismatch import MismatchWeights, mismatch_weights, sequence_mismatch
from gspo.options.aggregation import PER_SEQUENCE, Reduction
from gspo.options.penalties import reference_kl, token_penalties
from gspo.options.surrogates import Ratios, Terms, TermsOf, clipped, surrogate_of
from gspo.settings import Objective, RatioUnit, require_number
from gspo.staleness import ClipRange, objective_clip_range

MAX_RESIDUAL: Final = 1e15
"""Nats; the square of a larger one may have no float32."""


@dataclass(frozen=True)
class TokenRatios:
    """Each token's ratio and clip decisions, without gradient: [T], or [S, L] from ``padded_loss``."""

    ratio: Tensor
    """s_t, clamped and not clipped; 1 off the mask."""
    clipped_high: Tensor
    """bool: the upper bound removed this token's gradient (positive advantage)."""
    clipped_low: Tensor
    """bool: the lower bound removed this token's gradient (negative advantage)."""


@dataclass(frozen=True)
class LossOutput:
    """``loss`` is -J of this micro-batch (scalar; its graph is alive also for empty input); ``stats`` has no gradient."""

    loss: Tensor
    stats: SequenceStats
    tokens: TokenRatios | None = None
    """None unless asked for with ``with_tokens``."""


def gspo_loss(
    logprobs_T: Tensor,
    anchor_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    sequence_ids_T: Tensor,
    turn_ids_T: Tensor | None = None,
    *,
    num_sequences: int,
    clip_range: ClipRange,
    ratio_unit: RatioUnit = "sequence",
    tokens_per_sequence_S: Tensor | None = None,
    episode_ids_S: Tensor | None = None,
    reduction: Reduction = PER_SEQUENCE,
    mismatch_weights_S: Tensor | None = None,
    mismatch_weights_T: Tensor | None = None,
    dual_clip: float | None = None,
    surrogate: TermsOf | None = None,
    penalty_T: Tensor | None = None,
    log_ratio_clamp: float = 10.0,
    with_tokens: bool = False,
) -> LossOutput:
    """Return -J of one micro-batch (formula in the module docstring) and its statistics per sequence.

    logprobs_T: log pi_theta at the sampler's temperature, float32 (float64 is allowed), carries the gradient.
    anchor_logprobs_T: behaviour or proximal log-probs, never with gradient. advantages_T: A_t, float32 or float64.
    mask_T: bool, True at action tokens. sequence_ids_T: int64 in [0, S), S = len(clip_range.lag_S). turn_ids_T: int64 >= 0,
    for unit "turn". A sequence or turn must not be split over micro-batches.
    num_sequences: N, of the whole optimizer step. clip_range: from ``gspo.clip_range``. tokens_per_sequence_S: n_i, needed
    if some action tokens of the trajectory are not in ``mask_T``; otherwise counted. episode_ids_S: the episode of each
    sequence, where episodes have several (``gspo.options.aggregation``); num_sequences then counts episodes, and
    tokens_per_sequence_S is that of the episode. reduction: another divisor than n_i. mismatch_weights_S: factors of A_t;
    0 rejects a sequence and changes neither n_i nor N; only meaningful with proximal anchors. mismatch_weights_T:
    instead of these, a factor of each token's A_t. dual_clip: c > 1, the bound of s_t where A_t < 0. surrogate: the terms in
    the place of the clip's, from ``gspo.options.surrogates``; it takes no dual_clip. penalty_T: taken from the term of each
    action token, with its gradient (``gspo.options.penalties``). log_ratio_clamp: |log s_u| beyond it is
    clamped and counted; the gradient of a clamped unit stays, with the clamped ratio as its factor.
    with_tokens: also return each token's ratio and clip decision.

    Raises: ValueError naming argument, index and value: half precision, other shapes, non-finite values at action
    tokens, ids out of range, num_sequences below the number of sequences present. A micro-batch without action tokens
    is valid: its loss is 0, with a gradient of zeros, so that ranks stay in step.
    """
    x = loss_inputs(
        logprobs_T,
        anchor_logprobs_T,
        advantages_T,
        mask_T,
        sequence_ids_T,
        turn_ids_T,
        num_local=clip_range.lag_S.shape[0],
        num_sequences=num_sequences,
        ratio_unit=ratio_unit,
        tokens_per_sequence_S=tokens_per_sequence_S,
        mismatch_weights_S=mismatch_weights_S,
        episode_ids_S=episode_ids_S,
    )
    if surrogate is not None and dual_clip is not None:
        raise ValueError(f"dual_clip is {dual_clip} with a surrogate, which replaces the clip; leave one of them out")
    reduction.require_tokens(x.counts_S)
    require_number("log_ratio_clamp", log_ratio_clamp, low=0.0, low_open=True)
    dtype = x.logp_T.dtype
    unit_T = x.units.ids_T

    # log s_t: the bracket is exactly zero. Added to the mean it would lose the digits of the clip range.
    delta_T = x.logp_T.detach() - x.anchor_T
    mean_delta_U = segment_mean(delta_T, x.mask_T, unit_T, x.units.num_units)
    log_s_U = mean_delta_U.clamp(-log_ratio_clamp, log_ratio_clamp)
    log_s_T = (x.logp_T - x.logp_T.detach()) + log_s_U[unit_T]

    by_sequence = ratio_unit == "sequence"
    num_tokens_U = x.counts_S if by_sequence else segment_sum(x.mask_T.to(dtype), unit_T, x.units.num_units)
    log_lo_U, log_hi_U = clip_range.bounds(x.units.sequence_ids_U, num_tokens_U)
    weighted_T = _weighted(x, mismatch_weights_S, mismatch_weights_T)
    ratios = Ratios(x, log_s_T, weighted_T, log_lo_U[unit_T], log_hi_U[unit_T])
    terms = clipped(ratios, dual_clip=dual_clip) if surrogate is None else surrogate(ratios)

    # J = 1/N sum_i 1/D_i sum_t, and D_i = n_i by default
    term_T = terms.term_T
    if penalty_T is not None:
        require_vector("penalty_T", penalty_T, term_T.shape[0])
        term_T = term_T - torch.where(x.mask_T, penalty_T, 0.0)
    divisors = reduction.divisors(x.episode_tokens_S, num_sequences)
    objective_S = segment_sum(term_T, x.sequence_ids_T, x.num_local) / divisors
    loss = -objective_S.sum() / num_sequences

    clamped_tokens_U = num_tokens_U * (mean_delta_U.abs() > log_ratio_clamp)
    mean_delta_S = mean_delta_U if by_sequence else x.mean_S(delta_T)
    residual_T = torch.where(x.mask_T, delta_T - mean_delta_S[x.sequence_ids_T], 0.0).clamp(-MAX_RESIDUAL, MAX_RESIDUAL)
    log_ratio_S = mean_delta_S.clamp(-log_ratio_clamp, log_ratio_clamp)
    capped_U = clip_range.is_capped(x.units.sequence_ids_U, num_tokens_U)
    log_bounds_U = (num_tokens_U * log_lo_U, num_tokens_U * log_hi_U, num_tokens_U * capped_U)
    stats = _statistics(x, clip_range, objective_S, log_ratio_S, residual_T, terms, clamped_tokens_U, log_bounds_U)
    if terms.dual_T is not None:
        stats = replace(stats, dual_clipped_S=x.mean_S(terms.dual_T))
    if mismatch_weights_T is not None:
        stats = replace(stats, masked_S=x.mean_S(x.mask_T & (mismatch_weights_T == 0)))
    if not with_tokens:
        return LossOutput(loss, stats)
    # Off the mask both advantages and clip decisions are 0, and the unit is that of another token.
    ratio_T = torch.where(x.mask_T, log_s_T.detach().exp(), 1.0)
    return LossOutput(loss, stats, TokenRatios(ratio_T, terms.high_T, terms.low_T))


def _weighted(x: LossInputs, mismatch_weights_S: Tensor | None, mismatch_weights_T: Tensor | None) -> Tensor:
    """A_t times its mismatch weight; the advantages are 0 off the mask."""
    if mismatch_weights_T is not None:
        require_vector("mismatch_weights_T", mismatch_weights_T, x.mask_T.shape[0])
        weights_T = torch.where(x.mask_T, mismatch_weights_T.detach().to(x.logp_T.dtype), 0.0)
        require_finite("mismatch_weights_T", weights_T)
        require_not_negative("mismatch_weights_T", weights_T)
        return x.advantages_T * weights_T
    return x.advantages_T if mismatch_weights_S is None else x.advantages_T * x.weights_S[x.sequence_ids_T]


def _statistics(
    x: LossInputs,
    clip_range: ClipRange,
    objective_S: Tensor,
    log_ratio_S: Tensor,
    residual_T: Tensor,
    terms: Terms,
    clamped_tokens_U: Tensor,
    log_bounds_U: tuple[Tensor, Tensor, Tensor],
) -> SequenceStats:
    """``log_bounds_U``: lower, upper, and 1 where they are capped, times the unit's tokens."""
    log_lo_S, log_hi_S, capped_S = (
        segment_sum(bound_U, x.units.sequence_ids_U, x.num_local) / x.counts_S.clamp(min=1) for bound_U in log_bounds_U
    )
    unmeasured_S, nothing_S = torch.full_like(x.weights_S, float("nan")), torch.zeros_like(x.weights_S)
    return SequenceStats(
        num_tokens_S=x.num_tokens_S,
        lag_S=clip_range.lag_S.detach(),
        advantage_S=x.mean_S(x.advantages_T),
        objective_S=objective_S.detach(),
        log_ratio_S=log_ratio_S,
        log_ratio_error_S=(x.mean_S(residual_T.square()) / x.counts_S.clamp(min=1)).sqrt(),
        clipped_high_S=x.mean_S(terms.high_T if terms.shares_T is None else terms.shares_T[0]),
        clipped_low_S=x.mean_S(terms.low_T if terms.shares_T is None else terms.shares_T[1]),
        clamped_tokens_S=segment_sum(clamped_tokens_U, x.units.sequence_ids_U, x.num_local),
        zero_advantage_S=segment_sum(x.advantages_T.abs(), x.sequence_ids_T, x.num_local) == 0,
        weight_S=x.weights_S,
        rejected_S=x.weights_S == 0,
        dual_clipped_S=nothing_S,
        masked_S=nothing_S,
        clip_low_S=log_lo_S,
        clip_high_S=log_hi_S,
        clip_capped_S=capped_S,
        mismatch_kl_S=unmeasured_S,
        reference_kl_S=unmeasured_S,
        teacher_kl_S=unmeasured_S,
        mismatch_S=unmeasured_S,
        mismatch_variance_S=unmeasured_S,
        entropy_S=unmeasured_S,
        group_S=torch.full_like(x.weights_S, UNKNOWN_GROUP),
    )


def objective_loss(
    objective: Objective,
    logprobs_T: Tensor,
    behaviour_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    sequence_ids_T: Tensor,
    turn_ids_T: Tensor | None = None,
    *,
    num_sequences: int,
    lag_S: Tensor | None = None,
    sigma: float = 0.0,
    clip_scale: float = 1.0,
    calibration: Calibration | None = None,
    proximal_logprobs_T: Tensor | None = None,
    reference_logprobs_T: Tensor | None = None,
    entropy_T: Tensor | None = None,
    group_ids_S: Tensor | None = None,
    num_tokens: int | None = None,
    episode_ids_S: Tensor | None = None,
    tokens_per_sequence_S: Tensor | None = None,
    with_tokens: bool = False,
) -> LossOutput:
    """Return the loss that ``objective`` asks for: choose the anchor, the clip range and the mismatch weights, each once.

    Arguments as in ``gspo_loss``. lag_S comes from ``sequence_lag`` (None: lag 0, and a row of statistics for each sequence
    up to the last one with action tokens), sigma from ``MismatchTracker`` (0 without one), clip_scale from ``AdaptiveClip``
    (1 without one; the loss itself does not adapt), calibration from ``LagCalibration.current`` (the paper's clip without
    one). proximal_logprobs_T: the log-probs of the weights at the start of the batch, for anchor "proximal" only; in the
    batch's first step ``logprobs_T.detach()`` is the same. reference_logprobs_T: those of the reference model,
    for a KL in the loss only. The mismatch KL compares the engine with the proximal log-probs where they are given, else
    with ``logprobs_T`` (exact in the first mini-batch). entropy_T (nats, read at action tokens) feeds the statistics, and
    the entropy bonus, for which it carries a gradient. group_ids_S (int64) only feeds the statistics. num_tokens: action
    tokens of the whole optimizer step, for aggregation "token" only. episode_ids_S and tokens_per_sequence_S: only for
    episodes of several sequences, the second only where an episode is split over micro-batches.
    Raises: ValueError as ``gspo_loss``, and if proximal log-probs are missing, or given but not used.
    """
    if objective.needs_proximal_logprobs != (proximal_logprobs_T is not None):
        raise ValueError(_MISSING_PROXIMAL if proximal_logprobs_T is None else _UNUSED_PROXIMAL)
    if lag_S is None:
        lag_S = torch.zeros(_num_present(sequence_ids_T, mask_T), device=logprobs_T.device)
    num_local = lag_S.shape[0]
    weights: MismatchWeights | None = None
    if proximal_logprobs_T is not None:
        weights = mismatch_weights(
            proximal_logprobs_T,
            behaviour_logprobs_T,
            mask_T,
            sequence_ids_T,
            num_local,
            mode=objective.weight_mode,
            cap=objective.weight_cap,
            floor=objective.tis_token_floor,
        )
    output = gspo_loss(
        logprobs_T,
        behaviour_logprobs_T if proximal_logprobs_T is None else proximal_logprobs_T,
        advantages_T,
        mask_T,
        sequence_ids_T,
        turn_ids_T,
        num_sequences=num_sequences,
        clip_range=objective_clip_range(objective, lag_S, sigma, clip_scale, calibration),
        ratio_unit=objective.ratio_unit,
        tokens_per_sequence_S=tokens_per_sequence_S,
        episode_ids_S=episode_ids_S,
        reduction=Reduction(aggregation=objective.aggregation, num_tokens=num_tokens, length=objective.aggregation_tokens),
        mismatch_weights_S=None if weights is None else weights.weights_S,
        mismatch_weights_T=None if weights is None else weights.weights_T,
        surrogate=surrogate_of(objective),
        penalty_T=token_penalties(
            objective, logprobs_T, mask_T, reference_logprobs_T=reference_logprobs_T, entropy_T=entropy_T
        ),
        log_ratio_clamp=objective.log_ratio_clamp,
        with_tokens=with_tokens,
    )
    stats = _measured(
        output.stats,
        logprobs_T if proximal_logprobs_T is None else proximal_logprobs_T,
        behaviour_logprobs_T,
        mask_T,
        sequence_ids_T,
        entropy_T,
        group_ids_S,
    )
    if not objective.has_clip_range:
        stats = replace(stats, clip_low_S=stats.clip_low_S * math.nan, clip_high_S=stats.clip_high_S * math.nan)
    if reference_logprobs_T is not None:
        kl_S = reference_kl(logprobs_T, reference_logprobs_T, mask_T, sequence_ids_T, num_local)
        stats = replace(stats, reference_kl_S=kl_S)
    return replace(output, stats=stats)


def _measured(
    stats: SequenceStats,
    learner_T: Tensor,
    behaviour_logprobs_T: Tensor,
    mask_T: Tensor,
    sequence_ids_T: Tensor,
    entropy_T: Tensor | None,
    group_ids_S: Tensor | None,
) -> SequenceStats:
    """Add the statistics that the loss itself does not compute."""
    num_local = stats.lag_S.shape[0]
    # Checked before, whichever of them is the anchor.
    with trusted_values():
        mismatch = sequence_mismatch(learner_T, behaviour_logprobs_T, mask_T, sequence_ids_T, num_local)
    stats = replace(
        stats, mismatch_kl_S=mismatch.kl_S, mismatch_S=mismatch.mean_S, mismatch_variance_S=mismatch.token_variance_S
    )
    if entropy_T is not None:
        require_vector("entropy_T", entropy_T, mask_T.shape[0])
        ids_T = torch.where(mask_T, sequence_ids_T, 0).long()
        stats = replace(stats, entropy_S=segment_mean(entropy_T.detach().float(), mask_T, ids_T, num_local))
    if group_ids_S is not None:
        require_vector("group_ids_S", group_ids_S, num_local)
        stats = replace(stats, group_S=group_ids_S)
    return stats


_MISSING_PROXIMAL = (
    "proximal_logprobs_T is missing with anchor 'proximal'; give the log-probs of the weights at the start of the batch: "
    "logprobs_T.detach() in the batch's first step, and for later steps those of an earlier pass without gradient. "
    "An objective with anchor 'behaviour', such as Objective(), needs none"
)
_UNUSED_PROXIMAL = "proximal_logprobs_T is given with anchor 'behaviour'; leave it out, or give it with anchor 'proximal'"


def _num_present(sequence_ids_T: Tensor, mask_T: Tensor) -> int:
    """One more than the largest id of an action token; 1 without any. It waits for the device."""
    if sequence_ids_T.shape != mask_T.shape or sequence_ids_T.numel() == 0:
        return 1  # the checks of the loss name the mistake
    return max(int(torch.where(mask_T.bool(), sequence_ids_T, 0).max()), 0) + 1

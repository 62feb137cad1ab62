"""What each token adds to J: the clipped surrogate, and its rivals.

    clip    min(s A, clip(s, lo, hi) A)                    PPO, arXiv 1707.06347; GSPO by its ratio unit
    cispo   sg[min(s, cap)] A log pi_theta                 MiniMax-M1, arXiv 2506.13585, without a lower bound, as there;
                                                           the cap is of s itself, as in ScaleRL, arXiv 2510.13786
    sapo    4/tau sigmoid(tau (s - 1)) A                   SAPO, arXiv 2511.20347; tau by the sign of A
    dppo    M min(s, cap) A, M = 0 where A (pi - mu) > 0   DPPO, arXiv 2602.04879: the binary form of the total
            and |pi - mu| > bound                          variation, with the authors' truncation (verl: dppo_tv)
    m2po    M s A, M = 0 at the tokens of largest          M2PO, arXiv 2510.01161, over all action tokens, as AReaL has it
            (log s)^2 until their mean is <= bound
    m2po_clip  min(s A, clip(s, e^-tau, e^tau) A), tau by   M2PO as its authors have it (Infini-AI-Lab/M2PO, af54a3e): only
            the harmful tokens of a call, at least eps     tokens count that the clip could reach, A log s > 0
    vespo   sg[e^l W^k e^(-l W)] A log pi_theta,           VESPO, arXiv 2602.10693 (FloyedShen/VESPO, aa1f304): W is the
            W = prod_t s_t over the sequence               product of a sequence's ratios; k, l by the sign of A
    gmpo    exp(1/n sum_t log clipped s_t) A               GMPO, arXiv 2507.20673: the one-sided clip of each token, then the
                                                           geometric mean of the sequence; eps is 1 - e^-0.4 and e^0.4 - 1

Each is a function of ``Ratios``, with the gradient that its source gives it; s is a token's ratio for all but the clip. With
unequal A_t the term of GMPO is GSPO-token's: the value of the mean, and each token's own gradient.

M2PO's mask and its clip are made of the tokens of one call, as in the implementations above. So they hold in every
micro-batch, and hence in the step, but which tokens they take depends on the split.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch
from torch import Tensor

from gspo.inputs.loss_inputs import LossInputs
from gspo.inputs.units import segment_mean, segment_sum
from gspo.settings import Objective, require_number

VESPO_POSITIVE: Final = (2.0, 3.0)
"""k and l of VESPO's kernel where A is not negative; its largest value, 1.21, is at W = 2/3."""
VESPO_NEGATIVE: Final = (3.0, 2.0)
"""Where A is negative: 1.24 at W = 3/2."""
VESPO_REACH: Final = (math.log(1e-8), 20.0)
"""The authors' bounds of log W. At both ends the kernel is below 3e-15, so that nothing overflows at any length."""
M2PO_LESS: Final = 1e-12
"""What the authors take from a square, so that the token whose log-ratio becomes tau is itself clipped."""


def beyond_dual_clip(log_s_T: Tensor, weighted_advantages_T: Tensor, dual_clip: float) -> Tensor:
    """Return bool [T]: where c A is the larger. Decided on logarithms, as the clip is, so that there are no ties.

    The dual clip bounds large ratios of tokens with a negative advantage (arXiv 1912.09729, eq. 4):

        A < 0:  term = max(min(s A, clip(s) A), c A),   c > 1

    min takes s A there, however large s is. With s above c the term is c A, and its gradient is 0.
    Raises: ValueError unless dual_clip is a finite number above 1.
    """
    require_number("dual_clip", dual_clip, low=1.0, low_open=True)
    return (weighted_advantages_T < 0) & (log_s_T > math.log(dual_clip))


@dataclass(frozen=True)
class Ratios:
    """What a term is made of, [T]; 0 off the mask."""

    inputs: LossInputs
    log_s_T: Tensor
    """log s_t, clamped; its gradient by log pi_theta is 1."""
    weighted_T: Tensor
    """A_t times its mismatch weight."""
    log_lo_T: Tensor
    log_hi_T: Tensor


@dataclass(frozen=True)
class Terms:
    """The terms of J, [T], and what was taken from their gradients; nothing off the mask."""

    term_T: Tensor
    high_T: Tensor
    """bool: the upper bound removed this token's gradient. CISPO: it was capped, and stays."""
    low_T: Tensor
    """bool: the lower bound removed it."""
    dual_T: Tensor | None = None
    """bool: the dual clip removed it; None without one."""
    shares_T: tuple[Tensor, Tensor] | None = None
    """SAPO and VESPO: the share of the gradient that the gate or the kernel removed, for A > 0 and for A < 0."""


TermsOf = Callable[[Ratios], Terms]


def surrogate_of(objective: Objective) -> TermsOf:
    """Return the terms that ``objective`` asks for."""
    if objective.surrogate == "clip":
        return partial(clipped, dual_clip=objective.dual_clip)
    by_name: dict[str, TermsOf] = {
        "cispo": partial(cispo, cap=objective.cispo_cap),
        "sapo": partial(sapo, tau_positive=objective.sapo_tau_positive, tau_negative=objective.sapo_tau_negative),
        "dppo": partial(dppo, bound=objective.dppo_bound, cap=objective.dppo_cap),
        "m2po": partial(m2po, bound=objective.m2po_bound),
        "m2po_clip": partial(m2po_clip, bound=objective.m2po_bound),
        "vespo": vespo,
        "gmpo": gmpo,
    }
    return by_name[objective.surrogate]


def clipped(x: Ratios, *, dual_clip: float | None = None) -> Terms:
    """min(s A, clip(s) A) takes the clipped side exactly in two cases. Deciding on logarithms keeps the digits that exp()
    would round away, and no tie of equal floats can split the gradient."""
    dtype = x.log_s_T.dtype
    high_T = (x.weighted_T > 0) & (x.log_s_T > x.log_hi_T)
    low_T = (x.weighted_T < 0) & (x.log_s_T < x.log_lo_T)
    log_s_T = torch.where(high_T, x.log_hi_T.to(dtype), torch.where(low_T, x.log_lo_T.to(dtype), x.log_s_T))
    dual_T = None if dual_clip is None else beyond_dual_clip(x.log_s_T, x.weighted_T, dual_clip)
    if dual_T is not None and dual_clip is not None:
        log_s_T = torch.where(dual_T, math.log(dual_clip), log_s_T)
    return Terms(log_s_T.exp() * x.weighted_T, high_T, low_T, dual_T)


def cispo(x: Ratios, *, cap: float) -> Terms:
    weight_T = x.log_s_T.detach().clamp(max=math.log(cap)).exp()
    above_T = (x.weighted_T != 0) & (x.log_s_T > math.log(cap))
    return Terms(weight_T * x.weighted_T * x.inputs.logp_T, above_T, torch.zeros_like(above_T))


def sapo(x: Ratios, *, tau_positive: float, tau_negative: float) -> Terms:
    # torch.where of two Python numbers would round them to float32.
    tau_T = torch.full_like(x.weighted_T, tau_negative).masked_fill(x.weighted_T > 0, tau_positive)
    gate_T = torch.sigmoid(tau_T * (x.log_s_T.exp() - 1))
    # The gradient is 4 gate (1 - gate) s A, and s A at s = 1.
    removed_T = 1 - 4 * (gate_T * (1 - gate_T)).detach()
    shares_T = (removed_T * (x.weighted_T > 0), removed_T * (x.weighted_T < 0))
    nothing_T = torch.zeros_like(x.inputs.mask_T)
    return Terms(4 / tau_T * gate_T * x.weighted_T, nothing_T, nothing_T, shares_T=shares_T)


def dppo(x: Ratios, *, bound: float, cap: float) -> Terms:
    shift_T = x.inputs.logp_T.detach().exp() - x.inputs.anchor_T.exp()
    high_T = (x.weighted_T > 0) & (shift_T > bound)
    low_T = (x.weighted_T < 0) & (shift_T < -bound)
    ratio_T = (x.log_s_T - (x.log_s_T.detach() - math.log(cap)).clamp(min=0.0)).exp()
    return Terms(torch.where(high_T | low_T, 0.0, ratio_T * x.weighted_T), high_T, low_T)


def m2po(x: Ratios, *, bound: float) -> Terms:
    moved_T, mask_T = x.log_s_T.detach(), x.inputs.mask_T
    sorted_T, order_T = torch.where(mask_T, moved_T.double().square(), math.inf).sort(stable=True)
    # The mean of the k smallest rises with k.
    count_T = torch.arange(1, order_T.shape[0] + 1, device=order_T.device)
    kept_T = torch.zeros_like(mask_T).scatter(0, order_T, sorted_T.cumsum(0) / count_T <= bound)
    taken_T = ~kept_T & (x.weighted_T != 0)
    return Terms(torch.where(kept_T, x.log_s_T.exp() * x.weighted_T, 0.0), taken_T & (moved_T > 0), taken_T & (moved_T < 0))


def m2po_clip(x: Ratios, *, bound: float) -> Terms:
    """Clip at +-tau, the largest |log s| of a harmful token for which the mean of min(log s, tau)^2 over these is below
    ``bound``; nothing where the mean of (log s)^2 is within it. ``x`` has the narrowest range that this may give."""
    moved_T = x.log_s_T.detach().double()
    harmful_T = moved_T.sign() * x.weighted_T.sign() > 0
    squares_T, num = moved_T.square(), harmful_T.sum()
    sorted_T = torch.where(harmful_T, squares_T, math.inf).sort().values
    count_T = torch.arange(1, sorted_T.shape[0] + 1, device=sorted_T.device)
    # The sum if no token counts for more than this one; never below anything, NaN included, where the harmful ones end.
    capped_T = sorted_T.cumsum(0) + (sorted_T - M2PO_LESS) * (num - count_T)
    fits_T = capped_T < bound * num - M2PO_LESS
    largest = torch.cat([sorted_T.new_zeros(1), torch.where(fits_T, sorted_T, 0.0)]).max()
    within = torch.where(harmful_T, squares_T, 0.0).sum() <= (bound + M2PO_LESS) * num
    tau = torch.where(within, math.inf, (largest - M2PO_LESS).clamp(min=0.0).sqrt())
    return clipped(replace(x, log_lo_T=x.log_lo_T.double().minimum(-tau), log_hi_T=x.log_hi_T.double().maximum(tau)))


def vespo(x: Ratios) -> Terms:
    inputs = x.inputs
    sums_S = segment_sum(x.log_s_T.detach().double(), inputs.sequence_ids_T, inputs.num_local)
    log_w_T = sums_S.clamp(*VESPO_REACH)[inputs.sequence_ids_T]
    negative_T = x.weighted_T < 0
    k_T, l_T = (
        torch.full_like(log_w_T, positive).masked_fill(negative_T, negative)
        for positive, negative in zip(VESPO_POSITIVE, VESPO_NEGATIVE, strict=True)
    )
    # phi(1) = 1. In logarithms: W^k alone may overflow.
    phi_T = (l_T + k_T * log_w_T - l_T * log_w_T.exp()).exp().to(x.log_s_T.dtype)
    removed_T, nothing_T = (1 - phi_T).clamp(min=0.0), torch.zeros_like(inputs.mask_T)
    shares_T = (removed_T * (x.weighted_T > 0), removed_T * negative_T)
    return Terms(phi_T * x.weighted_T * inputs.logp_T, nothing_T, nothing_T, shares_T=shares_T)


def gmpo(x: Ratios) -> Terms:
    plain = clipped(x)
    outside_T = plain.high_T | plain.low_T
    bounds_T = torch.where(plain.high_T, x.log_hi_T, x.log_lo_T).to(x.log_s_T.dtype)
    clipped_T = torch.where(outside_T, bounds_T, x.log_s_T)
    inputs, value_T = x.inputs, clipped_T.detach()
    mean_S = segment_mean(value_T, inputs.mask_T, inputs.sequence_ids_T, inputs.num_local)
    return Terms((clipped_T - value_T + mean_S[inputs.sequence_ids_T]).exp() * x.weighted_T, plain.high_T, plain.low_T)

"""What each token adds to J: the clipped surrogate of PPO (arXiv 1707.06347).

    clip    min(s A, clip(s, lo, hi) A)

It is a function of ``Ratios``, with the gradient that its source gives it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo.options.dual_clip import beyond_dual_clip


@dataclass(frozen=True)
class Ratios:
    """What a term is made of, [T]; 0 off the mask, where ``weighted_T`` is 0 too."""

    log_s_T: Tensor
    """log s_t, clamped; its gradient by log pi_theta is 1."""
    weighted_T: Tensor
    """A_t times its mismatch weight."""
    log_lo_T: Tensor
    log_hi_T: Tensor


@dataclass(frozen=True)
class Terms:
    """The terms of J, [T], and the tokens without a gradient."""

    term_T: Tensor
    high_T: Tensor
    """bool: the upper bound removed this token's gradient."""
    low_T: Tensor
    """bool: the lower bound removed it."""
    dual_T: Tensor | None = None
    """bool: the dual clip removed it; None without one."""


TermsOf = Callable[[Ratios], Terms]


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

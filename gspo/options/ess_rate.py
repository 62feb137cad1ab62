"""The learning rate by effective sample size: VCPO (arXiv 2602.17616, code at mit-han-lab/vcpo), of its two parts this one.

    w_i  = prod_t pi(y_t) / mu(y_t)               over the action tokens of sequence i
    rho  = (sum w)^2 / (B sum w^2)                over the B sequences of the optimizer step: Kish's, as a fraction
    rate = learning rate * sqrt(rho)

The square root is its authors' rule for Adam. Their other part, a baseline from the gradient norm of each trajectory, is not
here.
"""

from __future__ import annotations

import math

from torch import Tensor

from gspo.diagnostics import effective_sample_size


def ess_rate_scale(log_weights_S: Tensor) -> float:
    """Return sqrt(rho), in (0, 1]. log_weights_S: log w_i of every sequence of the step, finite; without any it is 1."""
    if log_weights_S.shape[0] == 0:
        return 1.0
    # rho does not depend on the scale of w, and the sum of a long sequence's log-ratios may have no exponential.
    log_w_S = log_weights_S.double()
    return math.sqrt(effective_sample_size((log_w_S - log_w_S.max()).exp()))

"""The dual clip: a bound for large ratios of tokens with a negative advantage (arXiv 1912.09729, eq. 4).

    A < 0:  term = max(min(s A, clip(s) A), c A),   c > 1

min takes s A there, however large s is. With s above c the term is c A, and its gradient is 0.
"""

from __future__ import annotations

import math

from torch import Tensor

from gspo.settings import require_number


def beyond_dual_clip(log_s_T: Tensor, weighted_advantages_T: Tensor, dual_clip: float) -> Tensor:
    """Return bool [T]: where c A is the larger. Decided on logarithms, as the clip is, so that there are no ties.

    Raises: ValueError unless dual_clip is a finite number above 1.
    """
    require_number("dual_clip", dual_clip, low=1.0, low_open=True)
    return (weighted_advantages_T < 0) & (log_s_T > math.log(dual_clip))

"""Answers that reach the limit of length (DAPO, arXiv 2503.14476, section 3.4).

A cut-off answer may have been on its way to a right one, so its reward of 0 says little. The penalty says it softly
(eq. 13):

    0                            n <= n_max - buffer
    ((n_max - buffer) - n) / buffer      below n_max, falling from 0 to -1
    -1                           n >= n_max

The filter takes such answers out of the loss instead: their advantages are 0. Their rewards stay in the baseline of their
group, and the sequences in n_i and N.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def overlong_penalties(
    num_tokens_M: NDArray[np.integer], *, max_tokens: int | NDArray[np.integer], buffer_tokens: int
) -> NDArray[np.float64]:
    """Return what is added to each reward, in [-1, 0]. num_tokens_M: counted as ``max_tokens`` is, one or one for each.

    Raises: ValueError unless 1 <= buffer_tokens <= max_tokens.
    """
    smallest = int(np.min(max_tokens))
    if not 1 <= buffer_tokens <= smallest:
        raise ValueError(f"buffer_tokens is {buffer_tokens}; give a number from 1 to max_tokens, which is {smallest}")
    excess_M = (np.asarray(num_tokens_M, dtype=np.float64) - (max_tokens - buffer_tokens)) / buffer_tokens
    return -np.clip(excess_M, 0.0, 1.0)


def overlong(num_tokens_M: NDArray[np.integer], *, max_tokens: int, filter_tokens: int) -> NDArray[np.bool_]:
    """Return which sequences the filter takes out: those of ``filter_tokens`` or more.

    Raises: ValueError if filter_tokens is above max_tokens: no sequence is that long.
    """
    if not 1 <= filter_tokens <= max_tokens:
        raise ValueError(f"filter_tokens is {filter_tokens}; give a number from 1 to max_tokens, which is {max_tokens}")
    long_M: NDArray[np.bool_] = np.asarray(num_tokens_M) >= filter_tokens
    return long_M

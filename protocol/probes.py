"""The sequence that learner and engine both score, and where. Pure: both ends make it from two numbers.

Scoring costs memory for each scored token and its whole vocabulary. So the first tokens are scored, and the last ones before
128, 256, 512 ... and before the end: what begins to differ at a window or a stretched position shows behind it. Each later
window repeats the first tokens, so that a model that copies has to look back to the beginning.
"""

from typing import Any, Final

import numpy as np

FIRST: Final = 64
WINDOW: Final = 32


def probe_spans(num_tokens: int) -> list[tuple[int, int]]:
    """Return the scored tokens, as first and behind the last, in order and apart. Token 0 has nothing before it."""
    spans = [(1, min(FIRST, num_tokens))]
    end = 2 * FIRST
    while end < num_tokens:
        spans.append((end - WINDOW, end))
        end *= 2
    if num_tokens > FIRST:
        spans.append((max(spans[-1][1], num_tokens - WINDOW), num_tokens))
    return [(first, last) for first, last in spans if first < last]


def probe_tokens(num_tokens: int, vocabulary: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the tokens, int64 [num_tokens], from the whole vocabulary but its last: SGLang misreports that in a prompt."""
    positions = np.arange(num_tokens, dtype=np.uint64)
    # The mixing of splitmix64: neighbours have nothing in common.
    mixed = (positions + 1) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    tokens = (mixed % np.uint64(vocabulary - 1)).astype(np.int64)
    for first, last in probe_spans(num_tokens)[1:]:
        tokens[first:last] = tokens[: last - first]
    return tokens

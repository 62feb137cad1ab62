"""The slow, obvious GSPO-token: Python floats and loops, one token at a time, with the gradient in closed form.

It shares no code with `gspo.loss`; tests compare the two. Formulas: arXiv 2507.18071, eq. 13-14, with the band of
`gspo.staleness`. The gradient of -J by log pi_theta(y_t) is

    -1/N * 1/n_i * s_u(t) * A_t     where t is not clipped, else 0

because the ratio enters through s_t = sg[s_u] * pi_theta(y_t) / sg[pi_theta(y_t)].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gspo.settings import RatioUnit


@dataclass(frozen=True, kw_only=True)
class ReferenceSequence:
    """One sequence, its tokens in lists of the same length; `mask` is True at action tokens."""

    logprobs: Sequence[float]
    anchor_logprobs: Sequence[float]
    advantages: Sequence[float]
    mask: Sequence[bool]
    turns: Sequence[int]
    lag: float = 0.0
    weight: float = 1.0


@dataclass(frozen=True)
class ReferenceResult:
    """-J; its gradient by every log-prob; +1 / -1 where the upper / lower bound clipped a token, else 0."""

    loss: float
    gradients: list[list[float]]
    clipped: list[list[int]]


def reference_loss(
    sequences: Sequence[ReferenceSequence],
    *,
    num_sequences: int,
    eps_low: float,
    eps_high: float,
    band_growth: float = 0.0,
    noise: float = 0.0,
    ratio_unit: RatioUnit = "sequence",
    log_ratio_clamp: float = 10.0,
    scale: float = 1.0,
) -> ReferenceResult:
    """Return -J of `sequences`, of a step with `num_sequences` sequences; noise is z * sigma, in nats.

    The band is scale * g(d) * (log(1 - eps_low), log(1 + eps_high)) -+ noise / sqrt(tokens of the unit), where g(d) is
    1 + c d for band growth c >= 0 and 1 / (1 + |c| d) for c < 0.
    """
    objective = 0.0
    gradients: list[list[float]] = []
    clipped: list[list[int]] = []
    for sequence in sequences:
        length = len(sequence.logprobs)
        actions = [t for t in range(length) if sequence.mask[t]]
        gradients.append([0.0] * length)
        clipped.append([0] * length)
        for t in actions:
            unit = [u for u in actions if _same_unit(ratio_unit, sequence.turns, t, u)]
            deltas = [sequence.logprobs[u] - sequence.anchor_logprobs[u] for u in unit]
            log_ratio = max(-log_ratio_clamp, min(log_ratio_clamp, math.fsum(deltas) / len(unit)))
            margin = noise / math.sqrt(len(unit))
            growth = (1 + abs(band_growth) * sequence.lag) ** (1 if band_growth >= 0 else -1)
            lo = math.exp(scale * growth * math.log(1 - eps_low) - margin)
            hi = math.exp(scale * growth * math.log(1 + eps_high) + margin)
            s, advantage = math.exp(log_ratio), sequence.advantages[t] * sequence.weight
            unclipped_term, clipped_term = s * advantage, min(max(s, lo), hi) * advantage
            objective += min(unclipped_term, clipped_term) / len(actions) / num_sequences
            if clipped_term < unclipped_term:
                clipped[-1][t] = 1 if s > hi else -1
            else:
                gradients[-1][t] = -unclipped_term / len(actions) / num_sequences
    return ReferenceResult(-objective, gradients, clipped)


def _same_unit(ratio_unit: RatioUnit, turns: Sequence[int], t: int, u: int) -> bool:
    if ratio_unit == "sequence":
        return True
    return turns[t] == turns[u] if ratio_unit == "turn" else t == u

"""The slow, obvious losses: Python floats and loops, one token at a time, with the gradient in closed form.

They share no code with ``gspo.loss`` or with each other; tests compare them.

``reference_loss``: GSPO-token (arXiv 2507.18071, eq. 13-14) for any ratio unit, with the clip range of ``gspo.staleness``.
The gradient of -J by log pi_theta(y_t) is

    -1/N * 1/n_i * s_u(t) * A_t     where t is not clipped, else 0

because the ratio enters through s_t = sg[s_u] * pi_theta(y_t) / sg[pi_theta(y_t)].

``reference_gspo`` (eq. 5-7 there) and ``reference_grpo`` (eq. 1-2 there) follow the papers, with one advantage per sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gspo.settings import RatioUnit


@dataclass(frozen=True, kw_only=True)
class ReferenceSequence:
    """One sequence, its tokens in lists of the same length; ``mask`` is True at action tokens."""

    logprobs: Sequence[float]
    anchor_logprobs: Sequence[float]
    advantages: Sequence[float]
    mask: Sequence[bool]
    turns: Sequence[int]
    lag: float = 0.0
    weight: float = 1.0


@dataclass(frozen=True)
class ReferenceResult:
    """-J, its gradient by every log-prob, and +1 / -1 where the upper / lower bound clipped a token, else 0."""

    loss: float
    gradients: list[list[float]]
    clipped: list[list[int]]


def reference_loss(
    sequences: Sequence[ReferenceSequence],
    *,
    num_sequences: int,
    eps_low: float,
    eps_high: float,
    clip_range_growth: float = 0.0,
    noise: float = 0.0,
    ratio_unit: RatioUnit = "sequence",
    log_ratio_clamp: float = 10.0,
    scale: float = 1.0,
) -> ReferenceResult:
    """Return -J of ``sequences`` in a step of ``num_sequences`` sequences; noise is z * sigma, in nats.

    The clip range is scale * g(d) * (log(1 - eps_low), log(1 + eps_high)) -+ noise / sqrt(tokens of the unit), where g(d) is
    1 + c d for clip range growth c >= 0 and 1 / (1 + |c| d) for c < 0.
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
            growth = (1 + abs(clip_range_growth) * sequence.lag) ** (1 if clip_range_growth >= 0 else -1)
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


def reference_gspo(
    sequences: Sequence[ReferenceSequence], *, num_sequences: int, eps_low: float, eps_high: float
) -> ReferenceResult:
    """Return -J of GSPO: 1/N sum_i min(s_i A_i, clip(s_i, 1 - eps_low, 1 + eps_high) A_i), s_i a geometric mean.

    A_i is the advantage of the first action token. Lag and weight of the sequences are not used. The gradient of s_i by
    log pi_theta(y_t) is s_i / n_i, the same for every action token.
    """
    objective = 0.0
    gradients: list[list[float]] = []
    clipped: list[list[int]] = []
    for sequence in sequences:
        actions = [t for t, is_action in enumerate(sequence.mask) if is_action]
        gradients.append([0.0] * len(sequence.mask))
        clipped.append([0] * len(sequence.mask))
        if not actions:
            continue
        log_likelihood_ratio = math.fsum(sequence.logprobs[t] - sequence.anchor_logprobs[t] for t in actions)
        s = math.exp(log_likelihood_ratio / len(actions))
        advantage = sequence.advantages[actions[0]]
        unclipped_term, clipped_term = s * advantage, min(max(s, 1 - eps_low), 1 + eps_high) * advantage
        objective += min(unclipped_term, clipped_term) / num_sequences
        for t in actions:
            if clipped_term < unclipped_term:
                clipped[-1][t] = 1 if s > 1 else -1
            else:
                gradients[-1][t] = -advantage * s / len(actions) / num_sequences
    return ReferenceResult(-objective, gradients, clipped)


def reference_grpo(
    sequences: Sequence[ReferenceSequence], *, num_sequences: int, eps_low: float, eps_high: float
) -> ReferenceResult:
    """Return -J of GRPO without KL: 1/N sum_i 1/n_i sum_t min(w_t A_t, clip(w_t, 1 - eps_low, 1 + eps_high) A_t).

    w_t = pi_theta(y_t) / pi_anchor(y_t). Lag and weight of the sequences are not used.
    """
    objective = 0.0
    gradients: list[list[float]] = []
    clipped: list[list[int]] = []
    for sequence in sequences:
        share = 1 / num_sequences / max(sum(sequence.mask), 1)
        gradients.append([0.0] * len(sequence.mask))
        clipped.append([0] * len(sequence.mask))
        for t, is_action in enumerate(sequence.mask):
            if not is_action:
                continue
            w, advantage = math.exp(sequence.logprobs[t] - sequence.anchor_logprobs[t]), sequence.advantages[t]
            if advantage > 0 and w > 1 + eps_high:
                objective += share * (1 + eps_high) * advantage
                clipped[-1][t] = 1
            elif advantage < 0 and w < 1 - eps_low:
                objective += share * (1 - eps_low) * advantage
                clipped[-1][t] = -1
            else:
                objective += share * w * advantage
                gradients[-1][t] = -share * w * advantage
    return ReferenceResult(-objective, gradients, clipped)


def _same_unit(ratio_unit: RatioUnit, turns: Sequence[int], t: int, u: int) -> bool:
    if ratio_unit == "sequence":
        return True
    return turns[t] == turns[u] if ratio_unit == "turn" else t == u

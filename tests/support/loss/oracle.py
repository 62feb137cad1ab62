"""The objective as docs/gspo.md writes it, in float64 on plain numbers that carry their own gradients.

Written from that page and from nothing else: it shares no code with ``gspo`` and reads like the formulas, the stop-gradients
included. Slow on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

from gspo.settings import Objective


@dataclass(frozen=True)
class Number:
    """A float and its derivatives by the variables, which have any hashable names."""

    value: float
    gradient: dict[tuple[str, int, int], float] = field(default_factory=dict)

    def __add__(self, other: Number | float) -> Number:
        other = _number(other)
        names = {**self.gradient, **other.gradient}
        return Number(self.value + other.value, {n: self.gradient.get(n, 0.0) + other.gradient.get(n, 0.0) for n in names})

    def __mul__(self, factor: float) -> Number:
        return Number(self.value * factor, {n: slope * factor for n, slope in self.gradient.items()})

    def __sub__(self, other: Number | float) -> Number:
        return self + _number(other) * -1.0

    def exp(self) -> Number:
        value = math.exp(self.value)
        return Number(value, {n: slope * value for n, slope in self.gradient.items()})

    def inverse(self) -> Number:
        return Number(1 / self.value, {n: -slope / self.value**2 for n, slope in self.gradient.items()})

    def squared(self) -> Number:
        return Number(self.value**2, {n: slope * 2 * self.value for n, slope in self.gradient.items()})


def _number(value: Number | float) -> Number:
    return value if isinstance(value, Number) else Number(float(value))


def sg(x: Number) -> float:
    """The value without its gradient."""
    return x.value


@dataclass(frozen=True, kw_only=True)
class OracleSequence:
    """One sequence, its tokens in lists of one length; ``mask`` is True at action tokens."""

    logprobs: Sequence[float]
    behaviour: Sequence[float]
    proximal: Sequence[float]
    reference: Sequence[float]
    entropies: Sequence[float]
    advantages: Sequence[float]
    mask: Sequence[bool]
    turns: Sequence[int]
    lag: float = 0.0
    episode: int = 0
    """Sequences of one episode have the same number."""

    @property
    def actions(self) -> list[int]:
        return [t for t, action in enumerate(self.mask) if action]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What was measured for the lags 0, 1, ...; older ones are as the last."""

    between: Sequence[float] = (0.0,)
    """A: variance between sequences."""
    token: Sequence[float] = (0.0,)
    """V: variance of a token."""


@dataclass(frozen=True)
class OracleResult:
    """-J, and its gradients by the log-probs and by the entropies of every token."""

    loss: float
    by_logprob: list[list[float]]
    by_entropy: list[list[float]]


def oracle_loss(
    objective: Objective,
    sequences: Sequence[OracleSequence],
    *,
    spare: int = 0,
    sigma: float = 0.0,
    clip_scale: float = 1.0,
    measured: Measurement = Measurement(),
) -> OracleResult:
    """Return -J of a whole optimizer step, in which ``spare`` sequences without action tokens are counted as well."""
    num_counted = len({s.episode for s in sequences}) + spare
    num_tokens = sum(len(s.actions) for s in sequences)
    kept = m2po_kept(objective, sequences) if objective.surrogate == "m2po" else frozenset()
    tau = m2po_tau(objective, sequences) if objective.surrogate == "m2po_clip" else 0.0
    J = Number(0.0)
    for i, sequence in enumerate(sequences):
        of_episode = sum(len(other.actions) for other in sequences if other.episode == sequence.episode)
        for t in sequence.actions:
            share = {
                "sequence": lambda n=of_episode: 1 / num_counted / n,
                "token": lambda: 1 / num_tokens,
                "constant": lambda: 1 / num_counted / (objective.aggregation_tokens or 0),
            }[objective.aggregation]()
            J = J + _term(objective, sequence, i, t, sigma, clip_scale, measured, kept, tau) * share
    loss = J * -1.0
    return OracleResult(
        loss.value,
        [[loss.gradient.get(("logprob", i, t), 0.0) for t in range(len(s.mask))] for i, s in enumerate(sequences)],
        [[loss.gradient.get(("entropy", i, t), 0.0) for t in range(len(s.mask))] for i, s in enumerate(sequences)],
    )


def _term(
    objective: Objective,
    y: OracleSequence,
    i: int,
    t: int,
    sigma: float,
    k: float,
    measured: Measurement,
    kept: frozenset[tuple[int, int]],
    tau: float,
) -> Number:
    """What token t of sequence i adds to J, before its share."""
    clamp = objective.log_ratio_clamp
    anchor = y.proximal if objective.anchor == "proximal" else y.behaviour
    unit = [u for u in y.actions if _together(objective.ratio_unit, y, t, u)]
    log_s_u = _clamped(math.fsum(y.logprobs[u] - anchor[u] for u in unit) / len(unit), clamp)
    logp = Number(y.logprobs[t], {("logprob", i, t): 1.0})
    s = (logp - sg(logp) + log_s_u).exp()
    log_bounds = _bounds(objective, y, len(unit), sigma, k, measured)
    if objective.surrogate == "m2po_clip":
        log_bounds = min(log_bounds[0], -tau), max(log_bounds[1], tau)
    weighted = y.advantages[t] * _weight(objective, y, t)
    unclipped = s * weighted
    clipped = _number(min(max(s.value, math.exp(log_bounds[0])), math.exp(log_bounds[1])) * weighted)
    term = unclipped if unclipped.value <= clipped.value else clipped
    if objective.surrogate not in ("clip", "m2po_clip"):
        term = _rival(objective, y, t, logp, s, weighted, log_bounds, (i, t) in kept)
    if objective.dual_clip is not None and weighted < 0 and objective.dual_clip * weighted > term.value:
        term = _number(objective.dual_clip * weighted)
    if objective.kl_coefficient > 0 and objective.kl_in == "loss":
        d = _number(_clamped(y.reference[t] - logp.value, clamp)) - (logp - sg(logp))
        term = term - _k(objective.kl_estimator, d) * objective.kl_coefficient
    if objective.entropy_coefficient > 0:
        entropy = Number(y.entropies[t], {("entropy", i, t): 1.0})
        term = term + entropy * objective.entropy_coefficient
    return term


def _rival(
    objective: Objective,
    y: OracleSequence,
    t: int,
    logp: Number,
    s: Number,
    weighted: float,
    log_bounds: tuple[float, float],
    kept: bool,
) -> Number:
    """The term of a rival of the clip, as its paper writes it, for one token."""
    r, mu = s.value, math.exp((y.proximal if objective.anchor == "proximal" else y.behaviour)[t])
    if objective.surrogate == "cispo":  # sg[min(r, cap)] A log pi
        return logp * (min(r, objective.cispo_cap) * weighted)
    if objective.surrogate == "sapo":  # 4 / tau sigmoid(tau (r - 1)) A
        tau = objective.sapo_tau_positive if weighted > 0 else objective.sapo_tau_negative
        return (((s - 1.0) * -tau).exp() + 1.0).inverse() * (4 / tau * weighted)
    if objective.surrogate == "dppo":  # nothing where |pi - mu| > bound and the advantage moves pi further
        pi = math.exp(y.logprobs[t])
        if abs(pi - mu) > objective.dppo_bound and (pi - mu) * weighted > 0:
            return Number(0.0)
        return s * (min(r, objective.dppo_cap) / r * weighted)
    if objective.surrogate == "m2po":
        return s * weighted if kept else Number(0.0)
    if objective.surrogate == "vespo":  # sg[e^l W^k e^(-l W)] A log pi, W from 1e-8 to e^20
        moved = [_clamped(y.logprobs[u] - y.behaviour[u], objective.log_ratio_clamp) for u in y.actions]
        log_w = min(max(math.fsum(moved), math.log(1e-8)), 20.0)
        power, decay = (2.0, 3.0) if weighted >= 0 else (3.0, 2.0)
        return logp * (math.exp(decay + power * log_w - decay * math.exp(log_w)) * weighted)
    assert objective.surrogate == "gmpo", objective.surrogate
    # The exponential of the mean of one-sidedly clipped log-ratios; a clipped token has no gradient.
    anchor = y.proximal if objective.anchor == "proximal" else y.behaviour
    logs = [_clamped(y.logprobs[u] - anchor[u], objective.log_ratio_clamp) for u in y.actions]
    signs = [y.advantages[u] * _weight(objective, y, u) for u in y.actions]
    low, high = log_bounds
    inside = [min(x, high) if sign > 0 else max(x, low) if sign < 0 else x for x, sign in zip(logs, signs, strict=True)]
    own = y.actions.index(t)
    step = logp - sg(logp) if inside[own] == logs[own] else Number(0.0)
    return (step + math.fsum(inside) / len(inside)).exp() * weighted


def m2po_kept(objective: Objective, sequences: Sequence[OracleSequence]) -> frozenset[tuple[int, int]]:
    """The tokens that are left when those of the largest squared log-ratio are masked until their mean is in bounds."""
    squares = {
        (i, t): _clamped(y.logprobs[t] - y.behaviour[t], objective.log_ratio_clamp) ** 2
        for i, y in enumerate(sequences)
        for t in y.actions
    }
    while squares and math.fsum(squares.values()) / len(squares) > objective.m2po_bound:
        del squares[max(squares, key=lambda token: squares[token])]
    return frozenset(squares)


def m2po_tau(objective: Objective, sequences: Sequence[OracleSequence]) -> float:
    """The bound of |log s| that the authors of M2PO give a call; infinite where the second moment is within its bound.

    Harmful tokens are those of A > 0 above and of A < 0 below 1. Their squares may count up to one of themselves, the
    largest with which the sum stays below the bound; 1e-12 less, so that this one is clipped as well."""
    squares = []
    for y in sequences:
        for t in y.actions:
            moved = _clamped(y.logprobs[t] - y.behaviour[t], objective.log_ratio_clamp)
            if (moved > 0 and y.advantages[t] > 0) or (moved < 0 and y.advantages[t] < 0):
                squares.append(moved**2)
    if not squares or math.fsum(squares) / len(squares) <= objective.m2po_bound:
        return math.inf
    budget = objective.m2po_bound * len(squares)
    fit = [v for v in squares if math.fsum(min(other, v) for other in squares) < budget]
    return math.sqrt(max(0.0, max(fit) - 1e-12)) if fit else 0.0


def _k(estimator: str, d: Number) -> Number:
    """An estimate of KL(pi_theta || pi_ref) from d = log pi_ref - log pi_theta."""
    if estimator == "k1":
        return d * -1.0
    if estimator == "k2":
        return d.squared() * 0.5
    assert estimator == "k3", estimator
    return d.exp() - 1.0 - d


def oracle_sequence_kl(objective: Objective, y: OracleSequence) -> float:
    """What is taken from the reward of a sequence with kl_in "reward"."""
    clamped = [_clamped(y.reference[t] - y.logprobs[t], objective.log_ratio_clamp) for t in y.actions]
    return objective.kl_coefficient * math.fsum(_k(objective.kl_estimator, Number(d)).value for d in clamped)


def _together(unit: str, y: OracleSequence, t: int, u: int) -> bool:
    return {"sequence": True, "turn": y.turns[t] == y.turns[u], "token": t == u}[unit]


def _clamped(value: float, bound: float) -> float:
    return max(-bound, min(bound, value))


def _bounds(
    objective: Objective, y: OracleSequence, num_tokens: int, sigma: float, k: float, measured: Measurement
) -> tuple[float, float]:
    c, z = objective.clip_range_growth, objective.noise_z
    g, margin = (1 + c * y.lag if c >= 0 else 1 / (1 + abs(c) * y.lag)), z * sigma / math.sqrt(num_tokens)
    if objective.clip_calibration == "widen" or (objective.clip_calibration is None and c == 0):
        margin = z * math.sqrt(_at(measured.between, y.lag) + _at(measured.token, y.lag) / num_tokens)
        margin = min(margin, objective.clip_calibration_cap / math.sqrt(num_tokens))
    if objective.anchor == "proximal":
        g, margin = 1.0, 0.0
    return k * g * math.log(1 - objective.eps_low) - margin, k * g * math.log(1 + objective.eps_high) + margin


def _at(values: Sequence[float], lag: float) -> float:
    """The value at a lag between two that were measured lies on the line between them."""
    lag = min(lag, len(values) - 1)
    below = math.floor(lag)
    return values[below] + (lag - below) * (values[math.ceil(lag)] - values[below])


def _weight(objective: Objective, y: OracleSequence, t: int) -> float:
    mode = objective.tis_mode or ("truncate" if objective.anchor == "proximal" else "off")
    mismatch = [y.proximal[u] - y.behaviour[u] for u in y.actions]
    w = math.exp(_clamped(math.fsum(mismatch) / len(mismatch), 10.0))
    C = objective.tis_cap
    if mode == "truncate":
        return min(w, C)
    if mode == "reject":
        return w if 1 / C <= w <= C else 0.0
    if mode == "truncate_tokens":
        return min(math.exp(y.proximal[t] - y.behaviour[t]), objective.tis_token_cap)
    if mode == "reject_tokens":
        k = math.exp(y.proximal[t] - y.behaviour[t])
        return k if objective.tis_token_floor <= k <= objective.tis_token_cap else 0.0
    if mode == "truncate_product":
        return min(math.prod(math.exp(x) for x in mismatch), objective.tis_product_cap)
    assert mode == "off", mode
    return 1.0


@dataclass(frozen=True, kw_only=True)
class OracleAdvantages:
    """What is chosen for the advantages, as docs/gspo.md names it."""

    leave_one_out: bool = False
    normalise: bool = True
    over_batch: bool = False
    n_max: int = 20
    buffer: int | None = None
    penalty: float = 1.0
    filter: int | None = None


def oracle_advantages(
    chosen: OracleAdvantages, rewards: Sequence[float], groups: Sequence[int], lengths: Sequence[int]
) -> list[float]:
    """Return A_i of each sequence."""
    r = [reward + _overlong(chosen, n) for reward, n in zip(rewards, lengths, strict=True)]
    advantages = []
    for i, group in enumerate(groups):
        of_group = [r[j] for j, other in enumerate(groups) if other == group]
        others = [r[j] for j, other in enumerate(groups) if other == group and j != i]
        if len(set(of_group)) == 1 or (chosen.filter is not None and lengths[i] >= chosen.filter):
            advantages.append(0.0)
            continue
        baseline = fmean(others) if chosen.leave_one_out else fmean(of_group)
        deviation = stdev(r if chosen.over_batch else of_group) + 1e-6 if chosen.normalise else 1.0
        advantages.append((r[i] - baseline) / deviation)
    return advantages


def _overlong(chosen: OracleAdvantages, n: int) -> float:
    if chosen.buffer is None or n <= chosen.n_max - chosen.buffer:
        return 0.0
    if n >= chosen.n_max:
        return -chosen.penalty
    return chosen.penalty * ((chosen.n_max - chosen.buffer) - n) / chosen.buffer

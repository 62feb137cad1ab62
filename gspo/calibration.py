"""Calibrates the clip range: measures the log-ratios of sequences by lag, before any training on their batch.

At the start of a batch the learner's weights are unchanged. So the mean log-ratio m_i of a sequence over the engine's
log-probs does not come from learning on this batch. It is the drift of the versions since sampling, and noise:

    m_i  ~  location b(d)  and  variance A(d) + V(d) / n_i          for n_i action tokens and lag d

V(d) is the variance of one token about its sequence's mean; A(d) is what sequences of one lag differ by beyond it. Both are
measured on the last ``window`` sequences of each lag, with estimates that outliers do not move:

    b = median m_i
    V = mean of the sequences' token variances, weighted by n_i - 1, each at most 4 times their median
    A = the least number for which median |m_i - b| / sqrt(A + V / n_i) is at most that of a normal distribution

If that holds with room to spare at A = 0, V is made smaller until it just holds: then tokens do not vary independently.
The median absolute deviation: Huber, Robust Statistics (1981).

The first 16 sequences of a lag count for nothing: the median of a few is whatever one of them happens to be. With k > 16 a
lag's numbers are ((k - 16) * measured + 16 * prior) / k. For lag 0 the prior is 0, the paper's clip. For lag d it is lag 0's
estimate plus d times the slope that fits the measured lags best (least squares, each weighted by its k - 16, with 16 more of
lag 1 that did not drift). So nothing jumps: a run begins with the paper's clip, and a new lag on the line. Beyond the oldest
measured lag the line continues for one version and then stays constant.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from gspo.diagnostics import LAG_BUCKETS, SequenceStats
from gspo.settings import require_number

PRIOR_SEQUENCES: Final = 16
"""So many sequences of a lag count for nothing, and as many beyond them weigh as much as the prior."""
MAD_TO_DEVIATION: Final = 1.4826
"""1 / Phi^-1(3/4): the factor from a median absolute deviation to the standard deviation of a normal distribution."""
MAX_VARIANCES: Final = 4.0
"""A sequence's token variance counts at most as this many medians: one outlier is not noise."""
BISECTIONS: Final = 40
MAX_LAGS: Final = 1024
"""Different lags that are kept; beyond, the sequences of older ones count as this lag."""
TOO_LARGE: Final = 1e100
"""A measurement from here on is refused: the squares of larger ones may overflow. float32 log-ratios stay below."""
FORMAT: Final = 2
"""Of ``LagCalibration.state_dict``. 1 had no ages: they count from when it is loaded."""


class Measured(NamedTuple):
    """One sequence under the weights of its batch's start."""

    lag: float
    """Versions; a mean over tokens."""
    num_tokens: float
    mean: float
    """m: mean of log pi - log mu over the action tokens, nats."""
    token_variance: float
    """Variance of log pi - log mu over the action tokens, about ``mean`` (divided by n - 1), nats squared; 0 for one."""


@dataclass(frozen=True)
class Calibration:
    """Location and variance of mean log-ratios for the lags 0, 1, ... (float64 [L]); older lags are as the last."""

    location_L: Tensor
    between_L: Tensor
    """A: variance between sequences, nats squared."""
    token_L: Tensor
    """V: variance of one token, nats squared."""

    def at(self, lag_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return location, A and V for float lags >= 0 (float64 [S], on their device), linear between two lags."""
        last = len(self.location_L) - 1
        place_S = lag_S.detach().double().clamp(max=float(last))
        below_S = place_S.floor().long()
        above_S = (below_S + 1).clamp(max=last)
        share_S = place_S - below_S
        found = []
        for values in (self.location_L, self.between_L, self.token_L):
            # A blocking copy would make the host wait for the device in every micro-batch.
            table = values.to(lag_S.device, non_blocking=True)
            found.append(table[below_S] * (1 - share_S) + table[above_S] * share_S)
        return found[0], found[1], found[2]


_NOTHING: Final = torch.zeros(1, dtype=torch.float64)
NOTHING_MEASURED: Final = Calibration(_NOTHING, _NOTHING, _NOTHING)
"""Before the first batch: the clip range is the paper's."""


def measured_sequences(stats: SequenceStats, rows: Sequence[int]) -> list[Measured]:
    """Return the sequences at these rows of a batch's statistics: those seen under the weights of the batch's start.

    They must be a fair sample of the batch's lags: a batch's first sequences are not where it is sorted by age.
    """
    columns = (stats.lag_S, stats.num_tokens_S, stats.mismatch_S, stats.mismatch_variance_S)
    return [Measured(*row) for row in torch.stack([column.double()[list(rows)] for column in columns], dim=1).tolist()]


def require_calibration(calibration: Calibration | None, needed_for: str) -> Calibration:
    """Return ``calibration``. Raises: ValueError when there is none."""
    if calibration is None:
        raise ValueError(
            f"calibration is missing with {needed_for}; give LagCalibration.current, and update it once per batch with the "
            "sequences measured under the weights of the batch's start"
        )
    return calibration


class LagCalibration:
    """The running estimates. Give every rank the same sequences in the same order, so that all have the same clip range.

    Raises: ValueError for a window that holds no more than the PRIOR_SEQUENCES, which count for nothing.
    """

    def __init__(self, *, window: int = 128) -> None:
        if window <= PRIOR_SEQUENCES:
            raise ValueError(f"window is {window}; give the sequences to keep for each lag, more than {PRIOR_SEQUENCES}")
        self._window = window
        self._by_lag: dict[int, deque[Measured]] = {}
        self._taken: Counter[int] = Counter()
        """Sequences of the last batch, by lag."""
        self._ages: dict[int, int] = {}
        """Batches since the last one with sequences of the lag."""
        self._current = NOTHING_MEASURED

    @property
    def current(self) -> Calibration:
        """The estimates after the last update."""
        return self._current

    @property
    def num_sequences(self) -> dict[int, int]:
        """How many sequences each lag's estimate rests on."""
        return {lag: len(kept) for lag, kept in sorted(self._by_lag.items())}

    def update(self, sequences: Iterable[Measured]) -> None:
        """Take in the sequences of one batch; those without action tokens are left out.

        Raises: ValueError, before anything is changed, for a number that is not finite, is negative where it cannot be, or
        reaches TOO_LARGE.
        """
        batch = [sequence for sequence in sequences if sequence.num_tokens > 0]
        for sequence in batch:
            _require(sequence)
        for sequence in batch:
            self._by_lag.setdefault(_lag(sequence), deque(maxlen=self._window)).append(sequence)
        self._taken = Counter(map(_lag, batch))
        self._ages = {lag: 0 if self._taken[lag] else self._ages.get(lag, 0) + 1 for lag in sorted(self._by_lag)}
        if batch:
            self._current = _estimate(self._by_lag)

    def metrics(self) -> dict[str, float]:
        """Return what the last batch gave, by "name/bucket" with the buckets of LAG_BUCKETS, for lags seen at least once.

        ``calibration_sequences``: those of the last batch that were taken. ``calibration_age``: batches since the last one
        that had any; 0: the last. ``calibration_location``: b, nats; of several lags in a bucket the one furthest from 0.
        """
        found: dict[str, float] = {}
        location_L, _, _ = self._current.at(torch.tensor(list(self._ages), dtype=torch.float64))
        for (lag, age), location in zip(self._ages.items(), location_L.tolist(), strict=True):
            bucket = next(name for name, high in LAG_BUCKETS if lag <= high)
            taken, oldest, furthest = (f"calibration_{name}/{bucket}" for name in ("sequences", "age", "location"))
            found[taken] = found.get(taken, 0.0) + self._taken[lag]
            found[oldest] = min(found.get(oldest, inf), float(age))
            found[furthest] = max(found.get(furthest, 0.0), location, key=abs)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the kept sequences, and the age of each lag, as plain numbers, strings and lists."""
        sequences = [list(sequence) for _, kept in sorted(self._by_lag.items()) for sequence in kept]
        return {"format": FORMAT, "sequences": sequences, "ages": list(self._ages.values())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. Raises: ValueError for a state of another format or with impossible numbers."""
        keys = {"format", "sequences", "ages"} if state.get("format") == FORMAT else {"format", "sequences"}
        if state.get("format") not in (1, FORMAT) or set(state) != keys:
            raise ValueError(
                f"the calibration has format {state.get('format')!r} and keys {sorted(state)}, this version reads formats 1 "
                f"to {FORMAT}: leave it out to measure again, which takes a few batches"
            )
        rows = state["sequences"]
        if not all(isinstance(row, list | tuple) and len(row) == len(Measured._fields) for row in rows):
            raise ValueError(f"a sequence of the calibration has fields other than {', '.join(Measured._fields)}")
        fresh = LagCalibration(window=self._window)
        fresh.update(Measured(*map(float, row)) for row in rows)
        lags = sorted(fresh._by_lag)
        ages = state.get("ages", [0] * len(lags))
        if not (isinstance(ages, list) and len(ages) == len(lags) and all(type(age) is int and age >= 0 for age in ages)):
            raise ValueError(f"ages are {ages!r:.200}; give a number of batches for each of the lags {lags!r:.200}")
        self._by_lag, self._ages, self._current = fresh._by_lag, dict(zip(lags, ages, strict=True)), fresh.current
        self._taken = Counter()


def _lag(sequence: Measured) -> int:
    """Return the whole lag that a sequence counts as: the nearest; of two, the even one (0.5 is 0, 1.5 and 2.5 are 2).

    So halves lean to neither side. Another rule would change what recorded runs measured, and their weights.
    """
    return min(MAX_LAGS - 1, round(sequence.lag))


def _require(sequence: Measured) -> None:
    require_number("lag", sequence.lag, low=0.0)
    require_number("num_tokens", sequence.num_tokens, low=0.0, high=TOO_LARGE)
    require_number("mean", sequence.mean, low=-TOO_LARGE, high=TOO_LARGE)
    require_number("token_variance", sequence.token_variance, low=0.0, high=TOO_LARGE)


def _estimate(by_lag: Mapping[int, Sequence[Measured]]) -> Calibration:
    lags = sorted(lag for lag, kept in by_lag.items() if len(kept) > PRIOR_SEQUENCES)
    if not lags:
        return NOTHING_MEASURED
    distance_K = torch.tensor(lags, dtype=torch.float64)[:, None]
    counts_K = torch.tensor([[len(by_lag[lag]) - PRIOR_SEQUENCES] for lag in lags], dtype=torch.float64)
    own_K = torch.tensor([_of_one_lag(by_lag[lag]) for lag in lags], dtype=torch.float64)
    weights_K = counts_K / (counts_K + PRIOR_SEQUENCES)
    at_zero = weights_K[0] * own_K[0] if lags[0] == 0 else torch.zeros(own_K.shape[1], dtype=torch.float64)
    rises = (counts_K * distance_K * (own_K - at_zero)).sum(dim=0)
    slope = rises / ((counts_K * distance_K.square()).sum() + PRIOR_SEQUENCES)
    table_L = at_zero + torch.arange(lags[-1] + 2, dtype=torch.float64)[:, None] * slope
    for row, lag in enumerate(lags):
        if lag > 0:
            table_L[lag] = weights_K[row] * own_K[row] + (1 - weights_K[row]) * table_L[lag]
    location_L, between_L, token_L = table_L.unbind(dim=1)
    return Calibration(location_L, between_L.clamp(min=0.0), token_L.clamp(min=0.0))


def _of_one_lag(kept: Sequence[Measured]) -> tuple[float, float, float]:
    """Location, A and V of one lag's sequences."""
    _, num_tokens, means, variances = torch.tensor(list(kept), dtype=torch.float64).unbind(dim=1)
    location = _median(means)
    distance = (means - location).abs()
    token = _token_variance(num_tokens, variances)

    def excess(between: float) -> float:
        """Return the square of the spread over the expected one: 1 where ``between`` fits."""
        allowed = (between + token / num_tokens).clamp(min=torch.finfo(torch.float64).tiny)
        return _square(MAD_TO_DEVIATION * _median(distance / allowed.sqrt()))

    if token > 0 and excess(0.0) <= 1:
        return location, 0.0, token * excess(0.0)
    low, high = 0.0, _square(MAD_TO_DEVIATION * _median(distance))
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 1 else (low, middle)
    return location, high, token


def _token_variance(num_tokens: Tensor, variances: Tensor) -> float:
    several = num_tokens > 1
    if not bool(several.any()):
        return 0.0
    bounded = variances[several].clamp(max=MAX_VARIANCES * _median(variances[several]))
    freedom = num_tokens[several] - 1
    return float((bounded * freedom).sum() / freedom.sum())


def _square(value: float) -> float:
    # ``value**2`` raises OverflowError where this is infinite, which is what a spread over almost no noise is.
    return value * value


def _median(values: Tensor) -> float:
    return float(values.quantile(0.5))

"""Question i: is the calibrated clip range, as the product has it, the right default?

Fixed on 2026-11-26, before the first run. Question f left this open: there calibrated was behind the fixed range and c =
1, it had no cap, groups were in the order of their tasks, and most arms chose the lowest rate of their grid.

**Regime.** That of question f, with lags 0..2 (the product's ``max_lag``), and mini-batches as the product deals them. 27
start models that nothing has used (200 to 226); their digests are in results/starts.json.

**Tuning** (i-tune; three other start models). Each arm tries each rate with each eps. Its best mean reward (held-out,
over the run) gives its *tuned* rate and eps; the best one at the shipped eps gives the rate of *shipped*. Where tuned
lies at an edge, one step beyond is tried, once: 2.5e-5, 4e-4, or 100 times eps, with the other number kept.

**Runs.** Seed by seed, most deciding first: i compares the arms, tuned and shipped, as dealt. i-order repeats tuned in an
order that does not look at lags, which describes and decides nothing.

**Rule.** A difference is the mean over seeds of the difference in reward between runs of one seed, with Student's
interval at 1 - 0.05 / 6 (Bonferroni: the four arms that clip have six pairs). Two arms are separated if it excludes 0.

1. Tuned is the primary comparison, because the shipped eps is the paper's and fits the paper's rate. The arm with the
   highest mean stays, and each that is not separated from it.
2. Of these the same in shipped: rates that nobody has fitted an eps to.
3. Of these those stay whose learner takes at most 1.1 times the CPU seconds of the cheapest.
4. Of these the one with the fewest settings wins (SETTINGS).

"The default is right" is refuted if another arm wins, shown if calibrated wins. It stays open, and the default stays, if
never clipping (tuned) is not behind the winner by more than its own interval: then the regime needs no clip.

**When.** All 27 seeds; at least 18 where time ends before. Time ends it, not results: a seed counts with all its runs of
i, or not at all, and the rule is applied once. ``reporting/default.py`` applies it, and refuses to before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from benchmarks.study.config import RunConfig
from benchmarks.study.questions.settled import REGIME as OF_LARGE_LAGS

SHIPPED_EPS: Final = (3e-4, 4e-4)
REGIME: Final = replace(OF_LARGE_LAGS, lag=2, order="dealt", start_models=1000)
CALIBRATED: Final = "calibrated"
NEVER: Final = "never clipping"
ARMS: Final[dict[str, dict[str, Any]]] = {
    CALIBRATED: {"clip_form": "widen", "noise_z": 1.0, "clip_cap": 0.5},
    "fixed": {},
    "c = 1": {"clip_range_growth": 1.0},
    "proximal": {"anchor": "proximal", "mismatch_mode": "truncate"},
    NEVER: {"clip": "none"},
}
SETTINGS: Final[dict[str, int]] = {"fixed": 2, "c = 1": 3, CALIBRATED: 4, "proximal": 4}
"""Numbers and modes that an arm has: eps (two); c; z and the cap; the mode and the cap of its weights."""
RATES: Final = (5e-5, 1e-4, 2e-4)
EPS: Final = (1.0, 10.0, 30.0)
"""As multiples of the shipped eps."""
TUNING_SEEDS: Final = (300, 301, 302)
SEEDS: Final = tuple(range(200, 227))
LEAST_SEEDS: Final = 18

BEYOND: Final[dict[str, tuple[tuple[float, float], ...]]] = {
    **dict.fromkeys((CALIBRATED, "fixed", "proximal"), ((4e-4, 10.0),)),
    NEVER: ((2.5e-5, 1.0),),
}
"""By arm: rate and multiple of eps one step beyond an edge where it was best."""
TUNED: Final[dict[str, tuple[float, float]]] = {
    **dict.fromkeys((CALIBRATED, "fixed", "proximal"), (2e-4, 10.0)),
    "c = 1": (1e-4, 10.0),
    NEVER: (5e-5, 1.0),
}
"""By arm: rate and multiple of eps, as i-tune chose them: ``best_settings`` of reporting/default.py, on the kept results."""
SHIPPED_RATE: Final[dict[str, float]] = {**dict.fromkeys((CALIBRATED, "fixed", "c = 1"), 2e-4), "proximal": 1e-4}
"""By arm that clips: the rate at the shipped eps, as i-tune chose it."""


def tuning() -> list[tuple[str, str, RunConfig]]:
    """Row, column and configuration of the runs that choose each arm's rate and eps."""
    return [
        (arm, column_of(*setting), _config(arm, seed, *setting))
        for seed in TUNING_SEEDS
        for arm in ARMS
        for setting in settings_of(arm)
    ]


def settings_of(arm: str) -> list[tuple[float, float]]:
    """Return the rates and multiples of eps that tuning tries for an arm."""
    eps = (1.0,) if arm == NEVER else EPS
    return [*((rate, each) for each in eps for rate in RATES), *BEYOND.get(arm, ())]


def comparison() -> list[tuple[str, str, RunConfig]]:
    """Row, column and configuration of the runs that decide; nothing until every arm is tuned."""
    if TUNED.keys() != ARMS.keys():
        return []
    return [
        (arm, column, _config(arm, seed, *setting))
        for seed in SEEDS
        for arm in ARMS
        for column, setting in (("tuned", TUNED[arm]), ("shipped", (SHIPPED_RATE.get(arm, 0.0), 1.0)))
        if column == "tuned" or arm in SETTINGS
    ]


def orders() -> list[tuple[str, str, RunConfig]]:
    """Row, column and configuration of the runs in an order that does not look at lags."""
    return [(arm, "shuffled", replace(config, order="drawn")) for arm, column, config in comparison() if column == "tuned"]


def column_of(rate: float, multiple: float) -> str:
    """The column of i-tune."""
    return f"lr {rate:g}, eps x {multiple:g}"


def _config(arm: str, seed: int, rate: float, multiple: float) -> RunConfig:
    low, high = SHIPPED_EPS
    return replace(REGIME, seed=seed, learning_rate=rate, eps_low=multiple * low, eps_high=multiple * high, **ARMS[arm])

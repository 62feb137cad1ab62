"""Question f: does a clip range that follows each lag's measured drift learn like the proximal anchor, without its pass?

Fixed on 2026-11-22, before the first run; docs/evidence/study.md has the regime and the answers. First each arm's learning
rate and eps are chosen on start models of their own (f-tune); then the chosen ones are compared on 27 others (f). The
candidate is the better of the two calibrated arms in tuning. What would decide it:

1. It learns like the proximal anchor: refuted if the candidate minus "proximal, truncated at 1.1" has an interval below
   -0.015; shown if the interval lies above -0.015; open otherwise.
2. Because widths follow the lag: shown if the candidate beats both controls, the constant width and the widths at random,
   with intervals above 0.
3. By lag, caps are better than one number: shown if "truncated by lag" beats each of 1.02, 1.1 and 2 with intervals above 0.

The candidate becomes the default if 1 and 2 are shown. If only 1 is shown, the default is the form that is not worse than
the proximal anchor in the sense of 1 and costs least. If 1 is not shown, the proximal anchor stays.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from benchmarks.study.config import RunConfig

REGIME: Final = RunConfig(
    task="countdown",
    seed=0,
    num_batches=24,
    num_sequences=128,
    eval_every=4,
    lag=8,
    lag_kind="uniform",
    noise="bf16",
    eps_low=3e-3,
    eps_high=4e-3,
)
"""Long answers, lags 0..8 in every batch, engine noise, an eps that clips some 13 % at lag 0. Never clipping fails here."""

PROXIMAL: Final[dict[str, Any]] = {"anchor": "proximal"}
CALIBRATED: Final = "calibrated"
RECENTRED: Final = "calibrated, re-centred"
MATCHED: Final = "constant width of the same mean"
SHUFFLED: Final = "the same widths at random"
TRUNCATED: Final = "proximal, truncated at 1.1"
ARMS: Final[dict[str, dict[str, Any]]] = {
    "fixed": {},
    "c = 1": {"clip_range_growth": 1.0},
    CALIBRATED: {"clip_form": "widen", "noise_z": 1.0},
    RECENTRED: {"clip_form": "recentre", "noise_z": 1.0},
    MATCHED: {"clip_form": "matched", "noise_z": 1.0},
    SHUFFLED: {"clip_form": "shuffled", "noise_z": 1.0},
    "no clip": {"clip": "none"},
    "proximal, off": PROXIMAL,
    "proximal, truncated at 1.02": {**PROXIMAL, "mismatch_mode": "truncate", "mismatch_cap": 1.02},
    TRUNCATED: {**PROXIMAL, "mismatch_mode": "truncate"},
    "proximal, truncated at 2": {**PROXIMAL, "mismatch_mode": "truncate", "mismatch_cap": 2.0},
    "proximal, truncated by lag": {**PROXIMAL, "mismatch_mode": "truncate_by_lag"},
    "proximal, rejected at 1.1": {**PROXIMAL, "mismatch_mode": "reject"},
}
RATES: Final = (1e-4, 2e-4, 4e-4)
USUAL_RATE: Final = 2e-4
WIDER: Final = 3.0
"""The other eps that is tried, at the usual learning rate, as a multiple."""
TUNING_SEEDS: Final = (100, 101, 102)
SEEDS: Final = tuple(range(27))
CHOSEN: Final[dict[str, tuple[float, float]]] = {
    "fixed": (2e-4, WIDER),
    "c = 1": (2e-4, 1.0),
    **dict.fromkeys((CALIBRATED, RECENTRED, MATCHED, SHUFFLED, "no clip"), (1e-4, 1.0)),
    **dict.fromkeys((arm for arm in ARMS if arm.startswith("proximal")), (1e-4, 1.0)),
}
"""Learning rate and multiple of eps by arm: those with the best mean reward in f-tune."""


def tuning() -> list[tuple[str, str, RunConfig]]:
    """Row, column and configuration of the runs that choose each arm's learning rate and eps."""
    settings = [(rate, 1.0) for rate in RATES] + [(USUAL_RATE, WIDER)]
    return [
        (arm, column_of(rate, wider), _config(arm, seed, rate, wider))
        for seed in TUNING_SEEDS
        for rate, wider in settings
        for arm in ARMS
        if not (arm == "no clip" and wider != 1.0)
    ]


def comparison() -> list[tuple[str, str, RunConfig]]:
    """Row, column and configuration of the runs that are compared."""
    return [(arm, "chosen", _config(arm, seed, *CHOSEN[arm])) for seed in SEEDS for arm in ARMS if arm in CHOSEN]


def column_of(rate: float, wider: float) -> str:
    """The column of f-tune."""
    return f"lr {rate:g}" if wider == 1 else f"lr {rate:g}, eps x {wider:g}"


def _config(arm: str, seed: int, rate: float, wider: float) -> RunConfig:
    eps = {"eps_low": wider * REGIME.eps_low, "eps_high": wider * REGIME.eps_high}
    return replace(REGIME, seed=seed, start_models=1000, learning_rate=rate, **eps, **ARMS[arm])

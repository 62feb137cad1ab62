"""Question m: how far may a run lag before it learns less than one without lag, and which rule lags furthest?

Fixed on 2026-11-30, before the first run. Questions d, f and i compared rules at one mixture of lags, and had no arm at lag
0 beside them: they do not say what staleness costs, nor what a better rule could win. The prize of a rule is a larger lag.

**Regime.** Every group has the same forced lag: 0, 2, 4, 8, 16 or 32 batches. Short answers (3 tokens), long ones (18 to
60) and mixed ones (6 to 120). 48 batches of 96 answers in 12 groups, 4 updates each as the product deals them, a sampler in
bfloat16. The reward is that of the held-out problems, averaged over the run.

**Arms.** *calibrated* (the product's default), *constant* (one width), *c = 1*, *proximal* (truncated, one more pass),
*VESPO* (arXiv 2602.10693), *M2PO* as its authors have it (arXiv 2510.01161), *never clipping*; and two rules of this
project's own, from mechanism: *tempered* (VESPO's kernel of W^power, with a power by the calibration) and *in nats* (a width
of the whole answer's log-ratio, constant in its length). ``benchmarks/study/clip_forms.py`` has both.

*Shipped*: nothing is tuned. Each arm has its authors' or this product's values (VESPO and M2PO with their mean over all
tokens), never clipping and *in nats* the values below, and all the study's usual rate of 2e-4. *Tuned* (m-tune: two other
start models, lag 8, a grid of rates and of widths for each answer length): every arm averages over sequences, so that rules
alone differ. Where the best setting lies at an edge, one step beyond is tried, up to twice. An arm whose best is at an edge
even then gets no verdict, and no other arm is compared with it.

**Margin** of an arm and seed: log2 of the largest lag up to which every lag's reward is at least that of the *ceiling* less
0.02; 0 if lag 2 is not. The ceiling is constant, tuned, at lag 0, with the same seed: what the run would have learned
without lag. A rule that learns less without lag has a margin of 0, too.

**Rule**, for each length by itself, with Student's 95 % interval over the four seeds of differences of one seed; for the
others of an arm Bonferroni is not applied, so one of twenty is ahead by chance, and the text says so.

1. *Two batches of lag cost a tuned width nothing*: the reward of constant, tuned, at lag 2 less the ceiling. Shown if the
   interval lies above -0.02, refuted if it lies below, open otherwise.
2. *Shipped, no rule lags further than the default*: margins of calibrated, shipped, less each other arm's. Refuted if one
   interval lies below 0, shown if every interval lies above -1 (an octave) and none below 0, open otherwise.
3. *Tuned, no rule lags further than a constant width*: the same for constant, tuned, and each other arm, tuned.

It is applied once, to four whole seeds of a length, and to each length as soon as those are there. The regime has missed its
aim at a length if the ceiling gains nothing (ends below its start) in a seed, or if never clipping, tuned, has a margin that
is not behind that of constant: then nothing needs a rule.

``python -m benchmarks.study.lag_margin`` makes the parts in order: m-tune, the settings that it chooses
(results/lag_tuned.json), m, the tables.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.study.config import RunConfig

REGIME: Final = RunConfig(
    task="countdown",
    seed=0,
    num_batches=48,
    num_sequences=96,
    eval_every=4,
    noise="bf16",
    order="dealt",
    start_models=1000,
)
LENGTHS: Final[dict[str, dict[str, Any]]] = {
    "short": {"task": "arithmetic"},
    "long": {"task": "countdown"},
    "mixed": {"task": "mixed-countdown"},
}
LAGS: Final = (0, 2, 4, 8, 16, 32)
TUNING_LAG: Final = 8
NEAR: Final = 0.02
"""Of the ceiling's reward."""
CALIBRATED: Final = "calibrated"
CONSTANT: Final = "constant"
NEVER: Final = "never clipping"
KERNEL: Final[dict[str, Any]] = {"ratio_unit": "token", "clip": "none"}
PAPER: Final = {"eps_low": 3e-4, "eps_high": 4e-4}
ALL_TOKENS: Final = {"aggregation": "length"}
USUAL_RATE: Final = 2e-4


@dataclass(frozen=True)
class Arm:
    """A rule, its values where nothing is tuned, and what tuning multiplies."""

    rule: dict[str, Any]
    values: dict[str, float]
    """Its width: what a multiple multiplies; nothing for a rule without one."""
    shipped: dict[str, Any]
    """What its authors have beside that, and tuned runs do not."""
    multiples: tuple[float, ...] = (1.0,)
    step: float = 3.0
    """From a multiple at an edge to the one beyond."""


_EPS: Final = (1.0, 10.0, 30.0)
ARMS: Final[dict[str, Arm]] = {
    CALIBRATED: Arm({"clip_form": "widen", "noise_z": 1.0, "clip_cap": 0.5}, PAPER, {}, _EPS),
    CONSTANT: Arm({}, PAPER, {}, _EPS),
    "c = 1": Arm({"clip_range_growth": 1.0}, PAPER, {}, _EPS),
    "proximal": Arm({"anchor": "proximal", "mismatch_mode": "truncate"}, PAPER, {}, _EPS),
    "VESPO": Arm({"surrogate": "vespo", **KERNEL}, {}, ALL_TOKENS),
    "M2PO": Arm(
        {"surrogate": "m2po_clip", "ratio_unit": "token", "eps_low": 0.3, "eps_high": 0.5},
        {"m2po_bound": 0.04},
        ALL_TOKENS,
        (0.25, 1.0, 4.0),
        step=4.0,
    ),
    NEVER: Arm({"clip": "none"}, {}, {}),
    "tempered": Arm({"surrogate": "tempered", **KERNEL}, {}, {}),
    "in nats": Arm({"clip_form": "total"}, {"eps_low": 0.3, "eps_high": 0.4}, {}, (0.3, 1.0, 3.0)),
}
RATES: Final = (1e-4, 2e-4, 4e-4)
TUNING_SEEDS: Final = (500, 501)
SEEDS: Final = (510, 511, 512, 513)
COLUMNS: Final = ("shipped", "tuned")
MOST_BEYOND: Final = 2

Setting = tuple[float, float]
"""A learning rate, and a multiple of the arm's width."""
TUNED_FILE: Final = Path(__file__).parents[1] / "results" / "lag_tuned.json"


@dataclass(frozen=True)
class Tuning:
    """What m-tune has chosen so far, by length and arm: "long/VESPO"."""

    chosen: dict[str, Setting]
    beyond: dict[str, list[Setting]]
    """Settings one or two steps beyond an edge, in the order in which they were asked for."""

    @classmethod
    def read(cls, path: Path = TUNED_FILE) -> Tuning:
        """Return what is kept; nothing before the first tuning."""
        plain = json.loads(path.read_text()) if path.is_file() else {"chosen": {}, "beyond": {}}
        chosen = {place: (rate, multiple) for place, (rate, multiple) in plain["chosen"].items()}
        beyond = {place: [(rate, multiple) for rate, multiple in found] for place, found in plain["beyond"].items()}
        return cls(chosen, beyond)

    def write(self, path: Path = TUNED_FILE) -> None:
        path.write_text(json.dumps({"chosen": self.chosen, "beyond": self.beyond}, indent=1, sort_keys=True) + "\n")


def place_of(length: str, arm: str) -> str:
    return f"{length}/{arm}"


def settings_of(length: str, arm: str, tuning: Tuning) -> list[Setting]:
    """Return what tuning tries for an arm: its grid, and what lies beyond an edge."""
    grid = [(rate, multiple) for multiple in ARMS[arm].multiples for rate in RATES]
    return [*grid, *tuning.beyond.get(place_of(length, arm), ())]


def tuned_config(length: str, arm: str, seed: int, lag: int, setting: Setting) -> RunConfig:
    """Return a run of an arm with a setting, averaged over sequences."""
    rule, (rate, multiple) = ARMS[arm], setting
    values = {name: multiple * value for name, value in rule.values.items()}
    return _config(length, seed, lag, {**rule.rule, **values, "learning_rate": rate})


def shipped_config(length: str, arm: str, seed: int, lag: int) -> RunConfig:
    """Return a run of an arm as its authors or the product have it."""
    rule = ARMS[arm]
    return _config(length, seed, lag, {**rule.rule, **rule.values, **rule.shipped, "learning_rate": USUAL_RATE})


def tuning_runs(tuning: Tuning | None = None) -> list[tuple[str, str, RunConfig]]:
    """Row, column and configuration of m-tune."""
    known = Tuning.read() if tuning is None else tuning
    return [
        (place_of(length, arm), column_of(setting), tuned_config(length, arm, seed, TUNING_LAG, setting))
        for length in LENGTHS
        for seed in TUNING_SEEDS
        for arm in ARMS
        for setting in settings_of(length, arm, known)
    ]


def comparison(tuning: Tuning | None = None) -> list[tuple[str, str, RunConfig]]:
    """Row, column and configuration of m, seed by seed; the tuned ones of a length once each of its arms is tuned."""
    known = Tuning.read() if tuning is None else tuning
    found = []
    for seed in SEEDS:
        for length in LENGTHS:
            is_tuned = all(place_of(length, arm) in known.chosen for arm in ARMS)
            for arm in ARMS:
                place = place_of(length, arm)
                for lag in LAGS:
                    found.append((place, f"shipped, lag {lag}", shipped_config(length, arm, seed, lag)))
                    if is_tuned:
                        tuned = tuned_config(length, arm, seed, lag, known.chosen[place])
                        found.append((place, f"tuned, lag {lag}", tuned))
    return found


def column_of(setting: Setting) -> str:
    """The column of m-tune."""
    rate, multiple = setting
    return f"lr {rate:g}, width x {multiple:g}"


def _config(length: str, seed: int, lag: int, values: dict[str, Any]) -> RunConfig:
    if lag == 0:
        # Without lag every growth gives the same clip range: one run.
        values = {name: value for name, value in values.items() if name != "clip_range_growth"}
    return replace(REGIME, seed=seed, lag=lag, **LENGTHS[length], **values)

"""The questions of the study, and the runs that answer each. Several questions can share a run.

The rule for question d was fixed before the first run. A variant is judged over all its lags by (1) collapses (fewest), then
(2) the mean over runs of the held-out reward averaged over the run's evaluations ("area"), where differences within the
95 % confidence interval of the paired difference to the fixed clip range count as equal, then (3) the clip fraction
nearest to that of the fixed clip range at lag 0, then (4) simplicity: a default that changes nothing wins a tie.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.study.config import RunConfig
from benchmarks.study.questions import default, lag, margin, paper, settled

ON_REQUEST = ("g-engine", "i-tune", "i", "i-order", "j", "j-between", "j-eps", "m-tune", "m")
"""Questions without a verdict, which are made on request only."""
SEEDS = (0, 1, 2)
MORE_SEEDS = (0, 1, 2, 3, 4, 5)

LONG = RunConfig(task="countdown", seed=0, num_batches=24, num_sequences=128, eval_every=4)
SHORT = RunConfig(task="arithmetic", seed=0, num_batches=24, num_sequences=256, eval_every=3)

GSPO: dict[str, Any] = {}
GSPO_10: dict[str, Any] = {"eps_low": 3e-3, "eps_high": 4e-3}
GSPO_100: dict[str, Any] = {"eps_low": 3e-2, "eps_high": 4e-2}
GRPO: dict[str, Any] = {"ratio_unit": "token", "eps_low": 0.2, "eps_high": 0.27}
NO_CLIP: dict[str, Any] = {"clip": "none"}

OBJECTIVES: dict[str, dict[str, Any]] = {
    "GSPO 3e-4/4e-4": GSPO,
    "GSPO 3e-3/4e-3": GSPO_10,
    "GSPO 3e-2/4e-2": GSPO_100,
    "GRPO 0.2/0.27": GRPO,
    "GRPO + replay": {**GRPO, "routing_replay": True},
    "sequence, no clip": NO_CLIP,
}

CLIP_RANGES: dict[str, dict[str, Any]] = {
    "fixed (c=0)": {},
    "widened c=0.5": {"clip_range_growth": 0.5},
    "widened c=1": {"clip_range_growth": 1.0},
    "widened c=2": {"clip_range_growth": 2.0},
    "tightened c=-1": {"clip_range_growth": -1.0},
    "proximal": {"anchor": "proximal"},
    "proximal, truncated": {"anchor": "proximal", "mismatch_mode": "truncate"},
    "adaptive 15 %": {"clip": "adaptive"},
    "no clip": NO_CLIP,
}
MAIN_CLIP_RANGES = (
    "fixed (c=0)",
    "widened c=1",
    "tightened c=-1",
    "proximal",
    "proximal, truncated",
    "adaptive 15 %",
    "no clip",
)

ANCHORS: dict[str, dict[str, Any]] = {
    "GSPO behaviour z=0": {},
    "GSPO behaviour z=1": {"noise_z": 1.0},
    "GSPO proximal": {"anchor": "proximal"},
    "GSPO proximal, truncated": {"anchor": "proximal", "mismatch_mode": "truncate"},
    "GRPO behaviour": GRPO,
}

SAMPLERS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16": {"noise": "bf16"},
    "weights 0.003": {"noise": "weights", "noise_sigma": 0.003},
    "weights 0.01": {"noise": "weights", "noise_sigma": 0.01},
    "weights 0.03": {"noise": "weights", "noise_sigma": 0.03},
    "weights 0.1": {"noise": "weights", "noise_sigma": 0.1},
    "log-probs 0.03": {"noise": "logprobs", "noise_sigma": 0.03},
}

WEIGHTINGS: dict[str, dict[str, Any]] = {"sequence": {}, "length": {"aggregation": "length"}}
GROUP_SIZES = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Cell:
    """One run in one question's table, with its row and column."""

    question: str
    row: str
    column: str
    config: RunConfig


def cells() -> list[Cell]:
    """Return every cell, most important first."""
    staleness = [*_staleness_short(), *_staleness_long()]
    clipping = [Cell("f-tune", *each) for each in settled.tuning()] + [Cell("f", *each) for each in settled.comparison()]
    published = [Cell("g", *each) for each in paper.comparison()]
    open_ones = [
        *(Cell("i-tune", *each) for each in default.tuning()),
        *(Cell("i", *each) for each in default.comparison()),
        *(Cell("i-order", *each) for each in default.orders()),
        *(Cell("g-engine", *each) for each in paper.engine_comparison()),
        *(Cell("j", *each) for each in margin.comparison()),
        *(Cell("j-between", *each) for each in margin.between()),
        *(Cell("j-eps", *each) for each in margin.narrower()),
        *(Cell("m-tune", *each) for each in lag.tuning_runs()),
        *(Cell("m", *each) for each in lag.comparison()),
    ]
    scaled = [*_scaled(), *_wider(), *_more(), *_oldest()]
    return [*staleness, *_objectives(), *_groups(), *_collapse(), *scaled, *_precision(), *clipping, *published, *open_ones]


def questions() -> list[str]:
    """Return the names of the questions, in the order of their runs."""
    return list(dict.fromkeys(cell.question for cell in cells()))


def runs(chosen: Iterable[str] | None = None) -> list[RunConfig]:
    """Return the runs of these questions (all that have results when None), each once, in order of importance.

    Raises: ValueError for a question that does not exist.
    """
    known = questions()
    wanted = [name for name in known if name not in ON_REQUEST] if chosen is None else list(chosen)
    for name in wanted:
        if name not in known and name not in ON_REQUEST:
            raise ValueError(f'there is no question "{name}": choose of {", ".join(known)}')
    unique = {cell.config.run_id: cell.config for cell in cells() if cell.question in wanted}
    return list(unique.values())


def _staleness_short() -> list[Cell]:
    """d: forced lag and the real asynchronous mixture, on short answers."""
    settings: dict[str, tuple[dict[str, Any], int]] = {
        "0": ({}, 24),
        "0..2": ({"lag": 2, "lag_kind": "uniform"}, 24),
        "1": ({"lag": 1}, 24),
        "4": ({"lag": 4}, 24),
        "16": ({"lag": 16}, 40),
    }
    return [
        Cell("d-short", row, lag, _with_clip_range(replace(SHORT, seed=seed, num_batches=count, **setting), row))
        for seed in SEEDS
        for lag, (setting, count) in settings.items()
        for row in CLIP_RANGES
    ]


def _staleness_long() -> list[Cell]:
    """d: the same on long answers, with the variants that matter most."""
    settings: dict[str, dict[str, Any]] = {"0": {}, "0..2": {"lag": 2, "lag_kind": "uniform"}, "4": {"lag": 4}}
    return [
        Cell("d-long", row, lag, _with_clip_range(replace(LONG, seed=seed, **setting), row))
        for seed in SEEDS
        for lag, setting in settings.items()
        for row in MAIN_CLIP_RANGES
    ]


def _wider() -> list[Cell]:
    """d: growth that is large enough to matter; in the first table it turned out to be too small."""
    rows = {"widened c=10": 10.0, "widened c=30": 30.0, "widened c=100": 100.0}
    settings: dict[str, dict[str, Any]] = {"0..2": {"lag": 2, "lag_kind": "uniform"}, "4": {"lag": 4}}
    wide = [
        Cell("d-wider", row, lag, replace(SHORT, seed=seed, clip_range_growth=growth, **setting))
        for seed in SEEDS
        for lag, setting in settings.items()
        for row, growth in rows.items()
    ]
    known = [
        Cell("d-wider", row, lag, _with_clip_range(replace(SHORT, seed=seed, **setting), row))
        for seed in SEEDS
        for lag, setting in settings.items()
        for row in ("fixed (c=0)", "proximal, truncated")
    ]
    return known + wide


def _scaled() -> list[Cell]:
    """d: ten times the paper's clip, which at this learning rate clips about as much at lag 0 as the paper reports."""
    rows: dict[str, dict[str, Any]] = {
        "fixed (c=0)": {},
        "widened c=1": {"clip_range_growth": 1.0},
        "widened c=10": {"clip_range_growth": 10.0},
        "proximal, truncated": CLIP_RANGES["proximal, truncated"],
    }
    lags: dict[str, dict[str, Any]] = {"0": {}, "4": {"lag": 4}}
    return [
        Cell("d-scaled", row, lag, replace(LONG, seed=seed, **GSPO_10, **setting, **({} if lag == "0" else values)))
        for seed in SEEDS
        for lag, setting in lags.items()
        for row, values in rows.items()
        if lag != "0" or row == "fixed (c=0)"
    ]


def _more() -> list[Cell]:
    """d: twice the seeds (two for each start model) where long answers left it open which anchor is better."""
    return [
        Cell("d-more", row, f"4, eps {name}", replace(LONG, seed=seed, lag=4, **values, **CLIP_RANGES[row]))
        for seed in MORE_SEEDS
        for name, values in (("3e-4/4e-4", GSPO), ("3e-3/4e-3", GSPO_10))
        for row in ("fixed (c=0)", "widened c=1", "proximal, truncated")
    ]


def _oldest() -> list[Cell]:
    """d: lag 64, long enough that half of the run is trained on weights that have learned."""
    config = replace(SHORT, num_batches=128, num_sequences=128, eval_every=8, lag=64)
    rows = ("fixed (c=0)", "widened c=1", "tightened c=-1", "proximal", "proximal, truncated", "no clip")
    return [
        Cell("d-oldest", row, "64", _with_clip_range(replace(config, seed=seed), row)) for seed in SEEDS[:2] for row in rows
    ]


def _with_clip_range(config: RunConfig, name: str) -> RunConfig:
    values = dict(CLIP_RANGES[name])
    if config.lag == 0:
        # Without lag every growth gives the same clip range: one run.
        values.pop("clip_range_growth", None)
    return replace(config, **values)


def _objectives() -> list[Cell]:
    """a: ratio units and their clips at lag 0, on long answers."""
    return [
        Cell("a", objective, "2e-4", replace(LONG, seed=seed, **values))
        for seed in SEEDS
        for objective, values in OBJECTIVES.items()
    ]


def _collapse() -> list[Cell]:
    """a: two and a half and five times the learning rate: which objectives collapse?"""
    names = ("GSPO 3e-4/4e-4", "GSPO 3e-3/4e-3", "GRPO 0.2/0.27", "GRPO + replay")
    return [
        Cell("a-collapse", name, label, replace(LONG, seed=seed, num_batches=count, learning_rate=rate, **OBJECTIVES[name]))
        for label, rate, count in (("5e-4", 5e-4, 28), ("1e-3", 1e-3, 40))
        for seed in SEEDS
        for name in names
    ]


def _precision() -> list[Cell]:
    """c: differences between sampler and learner, and how much each objective tolerates."""
    config = replace(LONG, num_batches=16)
    return [
        Cell("c", anchor, sampler, replace(config, seed=seed, **values, **noise))
        for seed in SEEDS
        for sampler, noise in SAMPLERS.items()
        for anchor, values in ANCHORS.items()
    ]


def _groups() -> list[Cell]:
    """e: group size at a constant number of samples, and the weight of a sequence."""
    sizes = [
        Cell("e", f"group of {size}", "arithmetic", replace(SHORT, seed=seed, group_size=size))
        for seed in SEEDS
        for size in GROUP_SIZES
    ]
    weights = [
        Cell("e", f"{name}-weighted", "countdown", replace(LONG, seed=seed, **values))
        for seed in SEEDS
        for name, values in WEIGHTINGS.items()
    ]
    return sizes + weights

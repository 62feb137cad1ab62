"""How much the demo clips, synchronous against asynchronous, and at which lag, with each anchor, clip range and eps.

make demo-clip             # or: python -m benchmarks.demo_clip --seeds 0 1 --batches 40
"""

import argparse
import json
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from math import nan
from pathlib import Path
from statistics import fmean

from benchmarks.command import run, tiny_model
from gspo_services.runs.metrics import read_metrics

PAPER = ("objective.eps_low=0.0003", "objective.eps_high=0.0004")
BEHAVIOUR = (*PAPER, "objective.clip_calibration=off", "objective.noise_z=0")
VARIANTS: dict[str, tuple[str, ...]] = {
    "the demo: asynchronous, calibrated": (),
    "at the paper's eps: synchronous, fixed": (*BEHAVIOUR, "objective.clip_range_growth=0", "batch.max_lag=0"),
    "at the paper's eps: fixed": (*BEHAVIOUR, "objective.clip_range_growth=0"),
    "at the paper's eps: widened by lag (c = 1)": (*BEHAVIOUR, "objective.clip_range_growth=1"),
    "at the paper's eps: proximal anchor": (*PAPER, "objective.anchor=proximal", "objective.tis_cap=2"),
    "at the paper's eps: calibrated": PAPER,
}
NUM_PARTS = 4
LAG_PAIRS = (("lag_0", "lag_1"), ("lag_1", "lag_2"))
LEAST_SEQUENCES = 10
"""Sequences with a signal that a batch needs of both lags to count in their comparison."""


@dataclass(frozen=True)
class Outcome:
    """One run."""

    variant: str
    seed: int
    clip_fractions: list[float]
    """One per batch."""
    mean_lag: float
    batches_to_target: int | None
    last_reward: float
    dropped: int
    mean_reward: float
    """Held out, over the evaluations after the start."""
    clipped_by_lag: list[tuple[float, float, int]]
    """For each pair of lags: the clipped shares of both in the same batches, and how many batches had both."""


TARGET = 0.85


def main() -> None:
    """Run, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("examples/arithmetic.toml"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--directory", type=Path, default=Path("runs/clip"))
    arguments = parser.parse_args()
    outcomes = [
        outcome(arguments.config, arguments.directory, variant, seed, arguments.batches)
        for seed in arguments.seeds
        for variant in VARIANTS
    ]
    print(f"{arguments.config}, {datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, {platform.python_version()}\n")
    print(table(outcomes))
    print()
    print(table_by_lag(outcomes))
    record = arguments.directory / "clip.json"
    record.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")


def outcome(config: Path, root: Path, variant: str, seed: int, batches: int) -> Outcome:
    """Make the seed's model, run, measure. A finished run in its directory is measured again, an unfinished one resumed."""
    model, directory = root / f"model-{seed}", root / f"{seed}-{list(VARIANTS).index(variant)}"
    tiny_model(model, seed)
    own = (f"run.seed={seed}", f"run.num_batches={batches}", f"model.path={model}")
    run(config, directory, *own, *VARIANTS[variant])
    metrics = read_metrics(directory)
    trained, evals = metrics.batches, metrics.evaluations
    return Outcome(
        mean_reward=fmean(each.reward for each in evals[1:]),
        clipped_by_lag=[clipped_in_same_batches(trained, *pair) for pair in LAG_PAIRS],
        variant=variant,
        seed=seed,
        clip_fractions=[row["clip_fraction/all"] for row in trained],
        mean_lag=fmean(row["lag/all"] for row in trained),
        batches_to_target=next((each.batch for each in evals if each.reward >= TARGET), None),
        last_reward=evals[-1].reward,
        dropped=sum(row["event"] == "dropped" for _, row in metrics.events),
    )


def clipped_in_same_batches(trained: list[dict[str, float]], young: str, old: str) -> tuple[float, float, int]:
    """Return the clipped shares of two lags, of sequences with a signal, over the batches that have both.

    The share falls as the policy becomes certain, and lag 0 is there at the start only. So lags are compared within batches;
    a batch weighs by the rarer lag.
    """
    weights, shares = [], []
    for row in trained:
        signal = [row.get(f"signal_sequences/{lag}", 0) for lag in (young, old)]
        if min(signal) >= LEAST_SEQUENCES:
            weights.append(min(signal))
            clipped = [row[f"clip_fraction/{lag}"] * row[f"sequences/{lag}"] for lag in (young, old)]
            shares.append([each / number for each, number in zip(clipped, signal, strict=True)])
    if not weights:
        return (nan, nan, 0)
    first, second = (sum(w * share[k] for w, share in zip(weights, shares, strict=True)) / sum(weights) for k in (0, 1))
    return first, second, len(weights)


def parts(values: list[float]) -> list[float]:
    """Return the means of the quarters of a run, in order."""
    size = len(values) / NUM_PARTS
    return [fmean(values[round(index * size) : round((index + 1) * size)]) for index in range(NUM_PARTS)]


def table(outcomes: list[Outcome]) -> str:
    """Return Markdown with one line per run."""
    lines = [
        "| run | seed | mean lag | clipped: 1st quarter | 2nd | 3rd | 4th | all | batches to 0.85 | last reward | dropped |",
        "|" + "---|" * 11,
    ]
    for each in sorted(outcomes, key=lambda outcome: list(VARIANTS).index(outcome.variant)):
        quarters = " | ".join(f"{value:.2f}" for value in parts(each.clip_fractions))
        reached = "-" if each.batches_to_target is None else str(each.batches_to_target)
        lines.append(
            f"| {each.variant} | {each.seed} | {each.mean_lag:.2f} | {quarters} | "
            f"{fmean(each.clip_fractions):.2f} | {reached} | {each.last_reward:.2f} | {each.dropped} |"
        )
    return "\n".join(lines)


def table_by_lag(outcomes: list[Outcome]) -> str:
    """Return Markdown: the clipped shares of two lags in the same batches, for each run."""
    lines = ["| run | seed | lag 0 / lag 1 (batches) | lag 1 / lag 2 (batches) | reward, mean over run |", "|" + "---|" * 5]
    for each in sorted(outcomes, key=lambda outcome: list(VARIANTS).index(outcome.variant)):
        cells = " | ".join(f"{young:.2f} / {old:.2f} ({number})" for young, old, number in each.clipped_by_lag)
        lines.append(f"| {each.variant} | {each.seed} | {cells} | {each.mean_reward:.3f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

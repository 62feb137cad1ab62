"""Run the demo on several seeds (each sets model, tasks and sampling) and print the table of docs/evidence/results.md.

make demo-seeds            # or: python -m benchmarks.demo_seeds --config examples/calculator.toml --seeds 0 1 2
"""

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.markdown import table as markdown
from benchmarks.whole_runs import TARGET, keep, options, place, rows_of, seeded_run


@dataclass(frozen=True)
class Outcome:
    """One run. Times are seconds after all processes were ready."""

    seed: int
    first_reward: float
    best_reward: float
    last_reward: float
    seconds_to_target: float | None
    seconds: float
    batches: int
    mean_lag: float
    clip_fraction: float
    tokens_per_s: float
    dropped: int


def main() -> None:
    """Run, measure, print."""
    arguments = options(__doc__, "runs/seeds", [0, 1, 2]).parse_args()
    outcomes = []
    for seed in arguments.seeds:
        directory = arguments.directory / f"{arguments.config.stem}-{seed}"
        seeded_run(arguments.config, directory, seed, *arguments.overrides)
        outcomes.append(measure(directory, seed))
    print(f"{place(arguments.config)}\n\n{table(outcomes)}")
    keep(arguments.directory / f"{arguments.config.stem}.json", outcomes)


def measure(directory: Path, seed: int) -> Outcome:
    """Read what a finished run recorded."""
    rows = rows_of(directory)
    evals = [row for row in rows if row["event"] == "eval"]
    batches = [row for row in rows if row["event"] == "batch"]
    ready = max(served_at(directory))  # All processes were ready then.
    rewards = [row["eval/reward"] for row in evals]
    reached = [row["time"] - ready for row in evals if row["eval/reward"] >= TARGET]
    return Outcome(
        seed=seed,
        first_reward=rewards[0],
        best_reward=max(rewards),
        last_reward=rewards[-1],
        seconds_to_target=reached[0] if reached else None,
        seconds=rows[-1]["time"] - ready,
        batches=len(batches),
        mean_lag=fmean(row["lag/mean"] for row in batches),
        clip_fraction=fmean(row["clip_fraction/all"] for row in batches),
        tokens_per_s=sum(row["num_tokens"] for row in batches) / (batches[-1]["time"] - ready),
        dropped=sum(row["event"] == "dropped" for row in rows),
    )


def served_at(directory: Path) -> list[float]:
    """Return the wall time at which each rollout first served verified weights, in order of their names."""
    first = []
    for path in sorted((directory / "logs").glob("rollout-?.log")):
        lines: list[dict[str, Any]] = [
            json.loads(line) for line in path.read_text(errors="replace").splitlines() if line.startswith("{")
        ]
        loaded = next(line for line in lines if line.get("event") == "weights_loaded")
        first.append(datetime.fromisoformat(loaded["timestamp"]).timestamp())
    return first


def table(outcomes: list[Outcome]) -> str:
    """Markdown."""
    measured = ["best", "last", "s to 0.85", "s in all", "batches", "lag", "clipped", "tokens/s", "dropped"]
    rows = [
        (
            each.seed,
            f"{each.first_reward:.2f}",
            f"{each.best_reward:.2f}",
            f"{each.last_reward:.2f}",
            "-" if each.seconds_to_target is None else f"{each.seconds_to_target:.0f}",
            f"{each.seconds:.0f}",
            each.batches,
            f"{each.mean_lag:.2f}",
            f"{each.clip_fraction:.2f}",
            f"{each.tokens_per_s:.0f}",
            each.dropped,
        )
        for each in outcomes
    ]
    return markdown(["seed", "held-out reward: first", *measured], rows)


if __name__ == "__main__":
    main()

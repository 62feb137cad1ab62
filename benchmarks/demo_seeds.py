"""Run the demo on several seeds (each sets model, tasks and sampling) and print the table of docs/evidence/results.md.

make demo-seeds            # or: python -m benchmarks.demo_seeds --config examples/calculator.toml --seeds 0 1 2
"""

import argparse
import json
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.command import run, tiny_model

TARGET = 0.85


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("examples/arithmetic.toml"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--directory", type=Path, default=Path("runs/seeds"))
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    arguments = parser.parse_args()
    outcomes = [run_seed(arguments.config, arguments.directory, seed, arguments.overrides) for seed in arguments.seeds]
    print(f"{arguments.config}, {datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, {platform.python_version()}\n")
    print(table(outcomes))
    record = arguments.directory / f"{arguments.config.stem}.json"
    record.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")


def run_seed(config: Path, root: Path, seed: int, overrides: list[str]) -> Outcome:
    """Make the seed's model, run, measure. A directory that holds a run of this seed is resumed."""
    directory = root / f"{config.stem}-{seed}"
    model = root / f"model-{seed}"
    tiny_model(model, seed)
    run(config, directory, f"run.seed={seed}", f"model.path={model}", *overrides)
    return measure(directory, seed)


def measure(directory: Path, seed: int) -> Outcome:
    """Read what a finished run recorded."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
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
        mean_lag=sum(row["lag/mean"] for row in batches) / len(batches),
        clip_fraction=sum(row["clip_fraction/all"] for row in batches) / len(batches),
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
    head = (
        "| seed | held-out reward: first | best | last | s to 0.85 | s in all | batches | lag | clipped | tokens/s | "
        "dropped |"
    )
    lines = [head, "|" + "---|" * 11]
    for each in outcomes:
        target = "-" if each.seconds_to_target is None else f"{each.seconds_to_target:.0f}"
        lines.append(
            f"| {each.seed} | {each.first_reward:.2f} | {each.best_reward:.2f} | {each.last_reward:.2f} | {target} | "
            f"{each.seconds:.0f} | {each.batches} | {each.mean_lag:.2f} | {each.clip_fraction:.2f} | "
            f"{each.tokens_per_s:.0f} | {each.dropped} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

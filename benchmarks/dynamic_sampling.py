"""The demo with and without dynamic sampling, on several seeds: batches and tokens to a held-out reward of 0.85.

make bench-dynamic-sampling    # or: python -m benchmarks.dynamic_sampling --seeds 0 1 2 --batches 24

A directory that holds a finished run is only measured. Batches and tokens do not depend on how busy the machine is.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from benchmarks.command import run, tiny_model
from gspo_services.runs.audit import audit_run
from gspo_services.runs.metrics import read_metrics

TARGET: Final = 0.85
LATE_FROM: Final = 0.5
"""Late batches are those from this share of the run on."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run. Tokens are those that the policy sampled for training groups, trained or filtered out."""

    seed: int
    dynamic: bool
    batches_to_target: int | None
    tokens_to_target: int | None
    best_reward: float
    zero_advantage_share: float
    """Zero-advantage groups among those that were trained..."""
    late_zero_advantage_share: float
    """...and in late batches alone."""
    filtered_share: float
    """Groups filtered out, of all that became complete."""
    filtered_tokens: int
    audit: str


def main() -> None:
    """Run, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("examples/arithmetic.toml"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--batches", type=int, default=24)
    parser.add_argument("--directory", type=Path, default=Path("runs/dynamic_sampling"))
    parser.add_argument("--model", type=Path, help="start every seed from this model, and not from one of its own")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    arguments = parser.parse_args()
    outcomes = []
    for seed in arguments.seeds:
        for dynamic in (False, True):
            directory = arguments.directory / f"{'dynamic' if dynamic else 'plain'}-{seed}"
            if not finished(directory, arguments.batches):
                train(arguments, seed, directory, dynamic=dynamic)
            outcomes.append(measure(directory, seed, dynamic=dynamic))
            print(table(outcomes), flush=True)
    (arguments.directory / "outcomes.json").write_text(json.dumps([asdict(each) for each in outcomes], indent=1) + "\n")


def finished(directory: Path, num_batches: int) -> bool:
    """Whether the run in ``directory`` has trained all its batches."""
    return (directory / "metrics.jsonl").is_file() and len(read_metrics(directory).batches) >= num_batches


def train(arguments: argparse.Namespace, seed: int, directory: Path, *, dynamic: bool) -> None:
    """One run of the demo. A directory that holds a part of it is resumed."""
    model = arguments.model
    if model is None:
        model = arguments.directory / f"model-{seed}"
        tiny_model(model, seed)
    settings = [
        f"run.seed={seed}", f"run.num_batches={arguments.batches}", f"model.path={model}",
        "evaluation.every_batches=2", f"data.dynamic_sampling={str(dynamic).lower()}", *arguments.overrides,
    ]  # fmt: skip
    run(arguments.config, directory, *settings)


def measure(directory: Path, seed: int, *, dynamic: bool) -> Outcome:
    """Read what a finished run recorded."""
    metrics = read_metrics(directory)
    batches, evals = metrics.batches, metrics.evaluations
    filtered = [row for _, row in metrics.events if row["event"] == "filtered"]
    reached = next((each.batch for each in evals if each.reward >= TARGET), None)
    tokens = None
    if reached is not None:
        tokens = sum(row["num_action_tokens"] for row in batches if row["batch"] < reached)
        tokens += sum(sum(row["num_action_tokens"]) for row in filtered if row["batch"] < reached)
    audit = audit_run(directory)
    num_trained = sum(outcome.groups for outcome in audit.outcomes if outcome.status == "trained")
    late = [row for row in batches if row["batch"] >= LATE_FROM * len(batches)]
    zero_advantage, late_zero_advantage = (sum(row["num_zero_advantage_groups"] for row in part) for part in (batches, late))
    return Outcome(
        seed=seed,
        dynamic=dynamic,
        batches_to_target=reached,
        tokens_to_target=tokens,
        best_reward=max(each.reward for each in evals),
        zero_advantage_share=zero_advantage / num_trained,
        late_zero_advantage_share=late_zero_advantage * len(batches) / num_trained / len(late),
        filtered_share=len(filtered) / (num_trained + len(filtered)),
        filtered_tokens=sum(sum(row["num_action_tokens"]) for row in filtered),
        audit="clean" if audit.clean and audit.filtered == len(filtered) and not audit.dropped else str(audit.problems),
    )


def table(outcomes: list[Outcome]) -> str:
    """Markdown."""
    head = (
        "| seed | dynamic | batches to 0.85 | tokens to 0.85 | best | zero advantage | late | filtered out | audit |\n"
        + "|---" * 9 + "|"
    )  # fmt: skip
    rows = [
        f"| {each.seed} | {'yes' if each.dynamic else 'no'} | {each.batches_to_target or '-'} | "
        f"{each.tokens_to_target or '-'} | {each.best_reward:.2f} | {each.zero_advantage_share:.1%} | "
        f"{each.late_zero_advantage_share:.1%} | {each.filtered_share:.1%} | {each.audit} |"
        for each in outcomes
    ]
    return "\n".join([head, *rows])


if __name__ == "__main__":
    main()

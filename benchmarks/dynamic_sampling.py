"""The demo with and without dynamic sampling, on several seeds: batches and tokens to a held-out reward of 0.85.

make bench-dynamic-sampling    # or: python -m benchmarks.dynamic_sampling --seeds 0 1 2 --batches 24

A directory that holds a finished run is only measured. Batches and tokens do not depend on how busy the machine is.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.markdown import table as markdown
from benchmarks.whole_runs import batches_to_target, keep, options, seeded_run
from gspo_services.runs.audit import audit_run
from gspo_services.runs.metrics import RunMetrics

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
    parser = options(__doc__, "runs/dynamic_sampling", [0, 1, 2])
    parser.add_argument("--batches", type=int, default=24)
    parser.add_argument("--model", type=Path, help="start every seed from this model, and not from one of its own")
    arguments = parser.parse_args()
    outcomes = []
    for seed in arguments.seeds:
        for dynamic in (False, True):
            directory = arguments.directory / f"{'dynamic' if dynamic else 'plain'}-{seed}"
            settings = (f"run.num_batches={arguments.batches}", "evaluation.every_batches=2")
            settings += (f"data.dynamic_sampling={str(dynamic).lower()}", *arguments.overrides)
            metrics = seeded_run(arguments.config, directory, seed, *settings, model=arguments.model)
            outcomes.append(measure(directory, metrics, seed, dynamic=dynamic))
            print(table(outcomes), flush=True)
    keep(arguments.directory / "outcomes.json", outcomes)


def measure(directory: Path, metrics: RunMetrics, seed: int, *, dynamic: bool) -> Outcome:
    """Return the outcome of a finished run."""
    batches, evals = metrics.batches, metrics.evaluations
    filtered = [row for _, row in metrics.events if row["event"] == "filtered"]
    reached = batches_to_target(metrics)
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
    reached, shares = ["batches to 0.85", "tokens to 0.85", "best"], ["zero advantage", "late", "filtered out"]
    rows = [
        (
            each.seed,
            "yes" if each.dynamic else "no",
            each.batches_to_target or "-",
            each.tokens_to_target or "-",
            f"{each.best_reward:.2f}",
            f"{each.zero_advantage_share:.1%}",
            f"{each.late_zero_advantage_share:.1%}",
            f"{each.filtered_share:.1%}",
            each.audit,
        )
        for each in outcomes
    ]
    return markdown(["seed", "dynamic", *reached, *shares, "audit"], rows)


if __name__ == "__main__":
    main()

"""The cost of a training step compared with the bare model and with TRL, on the same tokens; and how it grows.

make bench-step            # or: .venv-parity/bin/python -m benchmarks.learner_step --rounds 9 --json learner_step.json

Everything runs in one process with one thread: a tiny Qwen3-MoE (that of the demonstration) and one of 26 million
parameters, float32 and bfloat16. A step is one optimizer step on one batch with long-tailed lengths and padding
efficiency 0.3 (``batches``). These take turns in one process:

- learner: ``train_batch`` on DeepSpeed's engine: advantages, packing, loss, diagnostics, backward, clipping, AdamW.
- bare: forward, log_softmax and gather, mean, backward of the same packed micro-batches with the same attention; with
  PyTorch's AdamW and clipping, and without both.
- learner, proximal; bare, proximal: the same after the forward pass for the log-probs of the batch's start.
- TRL: GRPOTrainer's own training_step on padded rows, clipping and AdamW, where TRL is installed (.venv-parity).

Only real tokens count, no padding. Speed is in CPU seconds, so that other work on the machine matters little; a ratio is
taken within a round, and its median over the rounds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch

from benchmarks.learner_step.batches import groups_of_lengths, long_tailed_lengths, num_tokens, padding_efficiency
from benchmarks.learner_step.growth import growth
from benchmarks.learner_step.measure import speed_ratio, summary, take_turns
from benchmarks.learner_step.models import MEDIUM, TINY, Shape, num_parameters
from benchmarks.learner_step.report import print_report
from benchmarks.learner_step.steps import Bare, Learner, packed_micro_batches

EFFICIENCY = 0.3
GOAL_BARE, GOAL_TRL = 0.9, 2.0
SIZES = {TINY.name: (TINY, 96, 512, 4096), MEDIUM.name: (MEDIUM, 16, 384, 1024)}
"""Model, sequences, longest answer, most tokens of a micro-batch."""
DTYPES = ("float32", "bfloat16")


def compare(
    shape: Shape,
    dtype: str,
    size: tuple[int, int, int],
    rounds: int,
    *,
    limit_s: float,
    with_trl: bool,
    work: Path,
) -> dict[str, Any]:
    """Measure all kinds of steps on one batch; return costs by kind and ratios."""
    sequences, longest, budget = size
    groups = groups_of_lengths(long_tailed_lengths(sequences, longest, EFFICIENCY), shape.vocabulary)
    num_micro_batches = len(packed_micro_batches(groups, budget))
    learner, bare = Learner(shape, dtype, budget), Bare(shape, dtype, budget)
    steps = {
        "learner": learner.step(groups),
        "bare": bare.step(groups, with_adam=False),
        "bare + AdamW": bare.step(groups, with_adam=True),
        "learner, proximal": learner.step(groups, anchor="proximal"),
        "bare + AdamW, proximal": bare.step(groups, with_adam=True, first_pass=True),
    }
    if with_trl:
        from benchmarks.learner_step.trl_step import TrlTrainer

        # As many micro-batches as the packed batch has, so that both pay for the same number of calls.
        while sequences % num_micro_batches:
            num_micro_batches += 1
        trl = TrlTrainer(shape, dtype, work, num_micro_batches=num_micro_batches, rows=sequences)
        steps["TRL"] = trl.step(groups)
    costs = take_turns(steps, rounds, limit_s=limit_s)
    total = num_tokens(groups)
    pairs = [("learner", "bare"), ("learner", "bare + AdamW"), ("learner, proximal", "bare + AdamW, proximal")]
    pairs += [("learner", "TRL"), ("bare + AdamW", "TRL")] if with_trl else []
    return {
        "model": shape.name,
        "parameters": num_parameters(bare.model),
        "dtype": dtype,
        "tokens": total,
        "sequences": sequences,
        "rounds": len(costs["learner"].cpu_s),
        "micro_batches": {"packed": len(packed_micro_batches(groups, budget)), "TRL": num_micro_batches},
        "padding_efficiency": padding_efficiency(groups),
        "steps": {name: summary(cost, total) for name, cost in costs.items()},
        "ratios": {f"{ours} / {theirs}": speed_ratio(costs[ours], costs[theirs]) for ours, theirs in pairs},
    }


def verdicts(comparisons: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tell for each goal in each comparison whether it holds."""
    goals = (("learner / bare", GOAL_BARE), ("learner / bare + AdamW", GOAL_BARE), ("learner / TRL", GOAL_TRL))
    return [
        {
            "model": row["model"],
            "dtype": row["dtype"],
            "ratio": name,
            "goal": goal,
            "value": row["ratios"][name]["ratio"],
            "holds": row["ratios"][name]["ratio"] >= goal,
        }
        for row in comparisons
        for name, goal in goals
        if name in row["ratios"]
    ]


def main() -> int:
    """Measure, print, write; 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds per comparison (default: %(default)s)")
    parser.add_argument("--limit-s", type=float, default=120.0, help="seconds per comparison (default: %(default)s)")
    parser.add_argument("--models", nargs="+", choices=sorted(SIZES), default=list(SIZES))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--no-trl", action="store_true", help="leave TRL out even where it is installed")
    parser.add_argument("--no-growth", action="store_true", help="leave out the growth of the speed")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with_trl = not arguments.no_trl and importlib.util.find_spec("trl") is not None
    begin = time.monotonic()
    comparisons = []
    with tempfile.TemporaryDirectory() as work:
        for name in arguments.models:
            shape, *size = SIZES[name]
            for dtype in arguments.dtypes:
                print(f"{name}, {dtype} ...", file=sys.stderr, flush=True)
                row = compare(
                    shape,
                    dtype,
                    tuple(size),
                    arguments.rounds,
                    limit_s=arguments.limit_s,
                    with_trl=with_trl,
                    work=Path(work),
                )
                comparisons.append(row)
    figures: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "processor": platform.processor() or platform.machine(),
        "rounds": arguments.rounds,
        "comparisons": comparisons,
        "growth": [] if arguments.no_growth else growth(max(2, arguments.rounds // 2), limit_s=arguments.limit_s / 8),
        "goals": verdicts(comparisons),
    }
    figures["seconds"] = time.monotonic() - begin
    print_report(figures)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0 if all(goal["holds"] for goal in figures["goals"]) else 1


if __name__ == "__main__":
    sys.exit(main())

"""The demo with an engine in FP8, with and without importance weights for it: python -m benchmarks.fp8

Each run is examples/arithmetic.toml with real SGLang; benchmarks/fp8/emulation.py says what FP8 is on a CPU. All seeds start
from one model; the seed is that of tasks, sampling and learner. Generation and training alternate, so that the engine's
precision is the only difference between engine and learner.

A finished run in its directory is measured again, an unfinished one goes on.
"""

import json
import os
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from benchmarks.fp8.emulation import MODULES
from benchmarks.markdown import table as markdown
from benchmarks.whole_runs import keep, options, place, seeded_run, tiny_model
from gspo_services.runs.metrics import RunMetrics
from gspo_services.shared.token_dump import read_parts, recorded_batches

ROOT = Path(__file__).parents[2]
HOOKS = json.dumps([{"name": "fp8", "target_modules": MODULES, "hook_factory": "benchmarks.fp8.emulation:hook"}])
FP8 = (f"rollout.server_args={json.dumps(['--forward-hooks', HOOKS])}",)
PROXIMAL = ("objective.anchor=proximal", "objective.tis_mode=")
ARMS: dict[str, tuple[str, ...]] = {
    "float32, behaviour anchor (the default)": (),
    "FP8, behaviour anchor (the default)": FP8,
    "FP8, proximal anchor, no weights": (*FP8, PROXIMAL[0], f"{PROXIMAL[1]}off"),
    "FP8, proximal anchor, a weight for each token": (*FP8, PROXIMAL[0], f"{PROXIMAL[1]}truncate_tokens"),
}
LAST = 2
"""Evaluations of the end of a run."""


@dataclass(frozen=True)
class Outcome:
    """One run. The mismatch is the learner's log-prob minus the engine's, nats, of sequences without lag that were trained
    in the first step of their batch: both had the same weights."""

    arm: str
    seed: int
    token_rms: float
    token_kl: float
    sequence_mean: float
    sequence_deviation: float
    clip_width: float
    """Half of the clip range, nats, of all sequences."""
    clipped: float
    reward_over_run: float
    reward_at_end: float


def main() -> None:
    """Run, measure, print."""
    parser = options(__doc__, "runs/fp8", [0, 1])
    parser.add_argument("--batches", type=int, default=20)
    arguments = parser.parse_args()
    outcomes = []
    for seed in arguments.seeds:
        for number, name in enumerate(ARMS):
            directory = arguments.directory / f"seed-{seed}-arm-{number}"
            settings = (f"run.num_batches={arguments.batches}", *ARMS[name], *arguments.overrides)
            metrics = trained(arguments.config, directory, seed, settings, fp8=name.startswith("FP8"))
            outcomes.append(measured(directory, metrics, name, seed, arguments.batches))
            print(outcomes[-1], flush=True)
    print(f"{place(arguments.config)}\n\n{table(outcomes)}")
    keep(arguments.directory / "outcomes.json", outcomes)


def trained(config: Path, directory: Path, seed: int, settings: tuple[str, ...], *, fp8: bool) -> RunMetrics:
    """Make a run from one start model for all. Raises: CalledProcessError; ValueError for an engine that computed something
    else than the arm says."""
    model = ROOT / "models" / "tiny"
    tiny_model(model, 0)
    # The engine's processes find this package by it, wherever they start.
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    own = ("batch.max_lag=0", "rollout.num_servers=1", "learner.dump_tokens=true")
    metrics = seeded_run(config, directory, seed, *own, *settings, model=model, environment=environment)
    hooked = all("Registered forward hook 'fp8'" in log.read_text() for log in directory.glob("logs/*-sglang.log"))
    if hooked != fp8:
        raise ValueError(f"{directory}: the engines' logs say {hooked} of FP8, the arm says {fp8}; remove the directory")
    return metrics


def measured(directory: Path, metrics: RunMetrics, arm: str, seed: int, limit: int) -> Outcome:
    """Return what a run recorded of its first ``limit`` batches."""
    batches = metrics.batches[:limit]
    rewards = [each.reward for each in metrics.evaluations if each.batch <= limit]
    return Outcome(
        arm=arm,
        seed=seed,
        **mismatch(directory, limit),
        clip_width=fmean((row["clip_range_high/all"] - row["clip_range_low/all"]) / 2 for row in batches),
        clipped=fmean(row["clip_fraction/all"] for row in batches),
        reward_over_run=fmean(rewards[1:]),
        reward_at_end=fmean(rewards[-LAST:]),
    )


def mismatch(directory: Path, limit: int) -> dict[str, float]:
    """Return the four measures of ``Outcome``, over the first ``limit`` batches."""
    parts = [part for batch in sorted(recorded_batches(directory))[:limit] for part in read_parts(directory, batch)]
    columns = {name: np.concatenate([_column(part.stats_SC, part.columns, name)[part.steps_S == 0] for part in parts])
               for name in ("lag_S", "num_tokens_S", "mismatch_S", "mismatch_variance_S", "mismatch_kl_S")}  # fmt: skip
    kept = (columns["lag_S"] == 0) & np.isfinite(columns["mismatch_S"])
    tokens, mean, variance, kl = (columns[name][kept] for name in list(columns)[1:])
    return {
        "token_rms": sqrt(np.average(variance + mean**2, weights=tokens)),
        "token_kl": float(np.average(kl, weights=tokens)),
        "sequence_mean": float(mean.mean()),
        "sequence_deviation": float(mean.std()),
    }


def _column(stats_SC: NDArray[np.float64], names: tuple[str, ...], name: str) -> NDArray[np.float64]:
    return stats_SC[:, names.index(name)]


def table(outcomes: list[Outcome]) -> str:
    """Return Markdown with one line for each arm; values by seed stand side by side."""
    names = "engine, objective | token: rms | KL | sequence: mean | deviation | half clip range | clipped | reward | at end"
    rows = []
    for arm in ARMS:
        runs = [each for each in outcomes if each.arm == arm]
        if not runs:
            continue
        columns = [[vars(run)[name] for run in runs] for name in list(vars(runs[0]))[2:]]
        cells = [" / ".join(f"{value:.2g}" for value in column) for column in columns[:5]]
        cells += [" / ".join(f"{value:.0%}" for value in columns[5])]
        cells += [" / ".join(f"{value:.3f}" for value in column) for column in columns[6:]]
        rows.append([arm, *cells])
    return markdown(names.split(" | "), rows)


if __name__ == "__main__":
    main()

"""The demo with an engine in FP8, with and without importance weights for it: python -m benchmarks.fp8

Each run is examples/arithmetic.toml with real SGLang; benchmarks/fp8/emulation.py says what FP8 is on a CPU. All seeds start
from one model; the seed is that of tasks, sampling and learner. With --lag 0 generation and training alternate, so that the
engine's precision is the only difference between engine and learner; with --lag 2 the demo runs as it is shipped.

A finished run in its directory is measured again, an unfinished one goes on.
"""

import argparse
import json
import os
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from math import sqrt
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from benchmarks.command import gspo, run
from benchmarks.fp8.emulation import MODULES
from gspo_services.runs.metrics import read_metrics
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
    "FP8, proximal anchor, a weight for each sequence": (*FP8, PROXIMAL[0], f"{PROXIMAL[1]}truncate"),
    "FP8, behaviour anchor, the paper's clip range": (*FP8, "objective.clip_calibration=off", "objective.noise_z=0"),
    "float32, proximal anchor, no weights": (PROXIMAL[0], f"{PROXIMAL[1]}off"),
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--arms", type=int, nargs="+", default=[0, 1, 2, 3], help=f"of {len(ARMS)}, from 0")
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--lag", type=int, default=0)
    parser.add_argument("--directory", type=Path, default=ROOT / "runs" / "fp8")
    arguments = parser.parse_args()
    names = [list(ARMS)[number] for number in arguments.arms]
    outcomes = []
    for seed in arguments.seeds:
        for name in names:
            directory = arguments.directory / f"lag-{arguments.lag}-seed-{seed}-arm-{list(ARMS).index(name)}"
            train(directory, name, seed, arguments.batches, arguments.lag)
            outcomes.append(measured(directory, name, seed, arguments.batches))
            print(outcomes[-1], flush=True)
    print(f"lag {arguments.lag}, {datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, {platform.python_version()}\n")
    print(table(outcomes))
    record = arguments.directory / f"lag-{arguments.lag}.json"
    record.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")


def train(directory: Path, arm: str, seed: int, batches: int, lag: int) -> None:
    """Run the demo in ``directory``, from one start model for all. Raises: CalledProcessError; ValueError for an engine that
    computed something else than the arm says."""
    model = ROOT / "models" / "tiny"
    # The engine's processes find this package by it, wherever they start.
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    gspo("model", "tiny", str(model), "--if-missing", environment=environment)
    own = (f"run.seed={seed}", f"run.num_batches={batches}", f"model.path={model}")
    settings = (*own, f"batch.max_lag={lag}", "rollout.num_servers=1", "learner.dump_tokens=true", *ARMS[arm])
    run(ROOT / "examples" / "arithmetic.toml", directory, *settings, environment=environment)
    hooked = all("Registered forward hook 'fp8'" in log.read_text() for log in directory.glob("logs/*-sglang.log"))
    if hooked != arm.startswith("FP8"):
        raise ValueError(f"{directory}: the engines' logs say {hooked} of FP8, the arm is {arm}; remove the directory")


def measured(directory: Path, arm: str, seed: int, limit: int) -> Outcome:
    """Read what a run recorded of its first ``limit`` batches."""
    metrics = read_metrics(directory)
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
    lines = [f"| {names} |", "|" + "---|" * 9]
    for arm in ARMS:
        runs = [each for each in outcomes if each.arm == arm]
        if not runs:
            continue
        columns = [[vars(run)[name] for run in runs] for name in list(vars(runs[0]))[2:]]
        cells = [" / ".join(f"{value:.2g}" for value in column) for column in columns[:5]]
        cells += [" / ".join(f"{value:.0%}" for value in columns[5])]
        cells += [" / ".join(f"{value:.3f}" for value in column) for column in columns[6:]]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""Long answers sampled in FP8, in one process: python -m benchmarks.fp8.long_answers

The study's countdown (18 to 60 tokens an answer, a model of 256,384 parameters), at the rate and eps that question i tuned
for each form that clips, without lag. The start models are question i's. The held-out reward is measured in float32, so it
says what was learnt, and not how FP8 answers.

**Claim, fixed on 2026-11-27 before the first run**: GSPO needs no weight for each token where the engine computes in FP8.
Refuted if the proximal anchor with weights for each token (at most 2, as verl has them) is ahead of the default, or of the
proximal anchor without weights, by an interval above 0; shown if both intervals end below 0.015 (the margin of question f);
open otherwise. Differences are between runs of one seed, with Student's 95 % interval.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.markdown import table as markdown
from benchmarks.study.config import RunConfig
from benchmarks.study.learner import HALVES, Learner
from benchmarks.study.questions.default import REGIME
from benchmarks.study.reporting.summary import interval
from benchmarks.study.run import batches
from gspo.diagnostics import SequenceStats

FIXED: Final = replace(REGIME, lag=0, num_batches=16, learning_rate=2e-4, eps_low=3e-3, eps_high=4e-3, noise="fp8")
CALIBRATED: Final[dict[str, Any]] = {"clip_form": "widen", "noise_z": 1.0, "clip_cap": 0.5}
PROXIMAL: Final[dict[str, Any]] = {"anchor": "proximal"}
DEFAULT, BARE, BY_TOKEN = "FP8, calibrated (the default)", "FP8, proximal, no weights", "FP8, proximal, by token"
ARMS: Final[dict[str, dict[str, Any]]] = {
    DEFAULT: CALIBRATED,
    BY_TOKEN: {**PROXIMAL, "mismatch_mode": "truncate_tokens", "mismatch_cap": 2.0},
    BARE: PROXIMAL,
    "float32, calibrated": {**CALIBRATED, "noise": "none"},
}
COLUMNS: Final = ("token_abs", "token_rms", "token_kl", "sequence_mean", "sequence_deviation", "width_lag_0", "clip")


class _Measuring(Learner):
    """Also records what engine and learner differ by under the same weights: in the first step of a batch."""

    def _judge(self, merged: SequenceStats, deltas: Sequence[Tensor]) -> dict[str, float]:
        first = slice(self._config.num_sequences // self._config.num_mini_batches)
        mean_S, tokens_S = merged.mismatch_S[first].double(), merged.num_tokens_S[first].double()
        square_S = merged.mismatch_variance_S[first].double() + mean_S.square()
        measured = {
            "token_rms": float(((square_S * tokens_S).sum() / tokens_S.sum()).sqrt()),
            "token_kl": float((merged.mismatch_kl_S[first].double() * tokens_S).sum() / tokens_S.sum()),
            "sequence_mean": float(mean_S.mean()),
            "sequence_deviation": float(mean_S.std()),
        }
        if self._config.anchor == "behaviour":
            measured["token_abs"] = float(torch.cat(list(deltas[:HALVES])).abs().mean())
        return super()._judge(merged, deltas) | measured


def main() -> None:
    """Make the runs that are missing, seed by seed, and print the table of whole seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[200, 201, 202, 203])
    parser.add_argument("--directory", type=Path, default=Path("runs/study"), help="of the start models; the records' too")
    arguments = parser.parse_args()
    runs = {}
    for seed in arguments.seeds:
        runs[seed] = {arm: _run(arguments.directory, replace(FIXED, seed=seed, **values)) for arm, values in ARMS.items()}
        print(table(runs), flush=True)


def _run(directory: Path, config: RunConfig) -> dict[str, float]:
    """Return a run's means, from its record if there is one."""
    path = directory / "fp8" / f"{config.run_id}.json"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = list(batches(directory, config, make_learner=_Measuring))
        rewards = [row["eval"] for row in rows if "eval" in row]
        measured: dict[str, float] = {
            name: fmean(row[name] for row in rows if name in row) for name in COLUMNS if name in rows[0]
        }
        measured |= {"reward": fmean(rewards[1:]), "at_end": fmean(rewards[-2:])}
        path.write_text(json.dumps({"config": config.as_dict(), "means": measured}))
    means = json.loads(path.read_text())["means"]
    assert isinstance(means, dict)
    return means


def table(runs: dict[int, dict[str, dict[str, float]]]) -> str:
    """Return Markdown with one line for each arm: means over seeds, and differences between runs of one seed."""
    names = [*COLUMNS, "reward", "at_end"]
    others = {name: f"less *{name}*" for name in (DEFAULT, BARE)}
    rows = []
    for arm in ARMS:
        found = [by_arm[arm] for by_arm in runs.values()]
        cells = [f"{fmean(run[name] for run in found):.2g}" if name in found[0] else "" for name in names[:-2]]
        cells += [f"{fmean(run[name] for run in found):.3f}" for name in names[-2:]]
        for other in others:
            pairs = [by_arm[arm]["reward"] - by_arm[other]["reward"] for by_arm in runs.values()]
            cells.append("-" if arm == other or len(pairs) < 2 else interval(pairs).text(3))
        rows.append([arm, *cells])
    return f"{len(runs)} seeds\n\n{markdown(['arm', *names, *others.values()], rows)}"


if __name__ == "__main__":
    main()

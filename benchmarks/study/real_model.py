"""Question k: the clip ranges on a model that somebody else made: SmolLM2-135M learns sums, ``examples/smollm2.toml``.

    python -m benchmarks.study.real_model                # every run that is missing, then the table
    python -m benchmarks.study.real_model --table        # the table of the kept results, in a second
    python -m benchmarks.study.real_model --gpu          # the same, where engine and learner share a GPU in bfloat16
    python -m benchmarks.study.real_model --bfloat16     # question l

Fixed on 2026-11-27, before the first run. The other questions have a made model, one process and a forced lag. Here every
part is real, and the lag is what ``max_lag = 2`` makes of it.

**Runs.** Each arm on seeds 0, 1 and 2, 20 batches at the example's learning rate; 64 held-out tasks after every fourth
batch. Nothing is tuned: what each arm is worth as it comes out of the box. *constant* is the paper's form with the width
that calibration found on this model before (eps 0.033 / 0.034). A run's score is the mean of its evaluations after the
start.

**Rule**, on differences of the score between runs of one seed, with Student's 95 % interval over three seeds. *Ahead* is
above 0 in each seed, with an interval above 0.

1. *The default is not behind on a real model* (primary): refuted if an arm is ahead of calibrated. That arm is then the
   default, unless question i has it behind as shipped.
2. *The paper's width is too narrow at lag 2*: shown if calibrated is ahead of fixed. Refuted if the mean is not above 0.
3. *What calibration gives is the width, without tuning*: refuted if calibrated and constant are apart. Shown if neither is
   ahead, and their mean difference is below 0.05. Open otherwise.

**On a GPU**, fixed on 2026-11-27 before its first run: the same arms, seeds, batches and rule. Engine and learner compute
in bfloat16, each with kernels of its own, so that their log-probs differ under the same weights too. Each run is a run of
its own, several at a time. The rule is applied to these runs alone. The aim is missed if the mean lag is below 1.

**Question l**, fixed on 2026-11-27 before its first run, because the runs on a GPU learned at half the pace of those in
float32, and moved the policy less: is it that a bfloat16 model's masters all begin in the middle of what rounds to its
weights? Two arms, on the seeds, batches and example of question k: engine and learner in bfloat16 on a CPU, with
``learner.spread_masters`` and without. *Spread masters learn faster*: shown if spread less middle is above 0 in each seed,
with an interval above 0; refuted if the mean is not above 0; open otherwise. Question k's *calibrated* is described beside
them: it is the same in float32.

Runs are on disk under ``--directory``: the command can be stopped and repeated.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from math import isnan
from pathlib import Path
from statistics import fmean
from typing import Final

from benchmarks.markdown import table as markdown
from benchmarks.study.reporting.summary import Interval, interval
from benchmarks.study.run_record import RESULTS
from benchmarks.whole_runs import run
from gspo_services.runs.metrics import RunMetrics

RESULTS_FILE: Final = RESULTS / "real_model.jsonl"
GPU_FILE: Final = RESULTS / "real_model_gpu.jsonl"
BFLOAT16_FILE: Final = RESULTS / "real_model_bfloat16.jsonl"
BFLOAT16: Final = ("model.dtype=bfloat16", "learner.dtype=bfloat16")
SPREAD, MIDDLE = "spread", "middle"
MASTERS: Final[dict[str, tuple[str, ...]]] = {SPREAD: (), MIDDLE: ("learner.spread_masters=false",)}
NUM_BATCHES: Final = 20
EVERY_BATCHES: Final = 4
SEEDS: Final = (0, 1, 2)
DEFAULT: Final = "calibrated"
_GIVEN: Final = ("objective.clip_calibration=off", "objective.noise_z=0")
_EVEN: Final = (*_GIVEN, "objective.clip_range_growth=0")
ARMS: Final[dict[str, tuple[str, ...]]] = {
    DEFAULT: (),
    "fixed": _EVEN,
    "c = 1": (*_GIVEN, "objective.clip_range_growth=1"),
    "constant": (*_EVEN, "objective.eps_low=0.033", "objective.eps_high=0.034"),
    "proximal": ("objective.anchor=proximal", "objective.tis_cap=2"),
}


@dataclass(frozen=True)
class Outcome:
    """One run."""

    arm: str
    seed: int
    start: float
    """Held-out reward of the start model."""
    rewards: list[float]
    """Held-out reward after every fourth batch."""
    clipped: float
    """Share of the sequences, mean over batches."""
    width: float
    """Upper end of the clip range as a log ratio, mean over batches."""
    mean_lag: float

    @property
    def score(self) -> float:
        return fmean(self.rewards)


def main() -> None:
    """Make what is missing, keep it, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("runs/real-model"), help="where runs are kept")
    parser.add_argument("--table", action="store_true", help="only print the table of the kept results")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--gpu", action="store_true", help="the runs on a GPU, with results of their own")
    other.add_argument("--bfloat16", action="store_true", help="the runs of question l")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="what this machine's servers need"
    )
    arguments = parser.parse_args()
    arms = MASTERS if arguments.bfloat16 else ARMS
    path = GPU_FILE if arguments.gpu else BFLOAT16_FILE if arguments.bfloat16 else RESULTS_FILE
    settings = (*(BFLOAT16 if arguments.gpu or arguments.bfloat16 else ()), *arguments.set)
    outcomes = kept(path)
    finished = {(each.arm, each.seed) for each in outcomes}
    missing = [] if arguments.table else [(arm, seed) for seed in SEEDS for arm in arms if (arm, seed) not in finished]
    with ThreadPoolExecutor(max_workers=arguments.jobs) as pool:
        for future in as_completed(
            pool.submit(made, arm, seed, arguments.directory / path.stem, (*settings, *arms[arm])) for arm, seed in missing
        ):
            outcomes.append(future.result())
            keep(path, outcomes)
    print(masters_table(outcomes, kept(RESULTS_FILE)) if arguments.bfloat16 else table(outcomes))


def kept(path: Path) -> list[Outcome]:
    """Return the outcomes in ``path``; none where there is no such file."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return [Outcome(**json.loads(line)) for line in lines]


def keep(path: Path, outcomes: list[Outcome]) -> None:
    """Write ``outcomes``; a reader sees all of them or the file before."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text("".join(json.dumps(asdict(each)) + "\n" for each in outcomes))
    unfinished.rename(path)


def made(arm: str, seed: int, root: Path, settings: tuple[str, ...]) -> Outcome:
    """Make a run, or go on with one that was stopped. Raises: CalledProcessError if it fails."""
    directory = root / f"{arm.replace(' ', '')}-{seed}"
    own = (
        f"run.seed={seed}",
        f"run.num_batches={NUM_BATCHES}",
        "batch.max_lag=2",
        f"evaluation.every_batches={EVERY_BATCHES}",
    )
    print(f"{arm}, seed {seed}, in {directory}", flush=True)
    return outcome(arm, seed, run(Path("examples/smollm2.toml"), directory, *own, *settings))


def outcome(arm: str, seed: int, metrics: RunMetrics) -> Outcome:
    """Return what a run recorded. Raises: ValueError for another number of batches or evaluations."""
    trained, held_out = metrics.batches, [each.reward for each in metrics.evaluations]
    if (len(trained), len(held_out)) != (NUM_BATCHES, 1 + NUM_BATCHES // EVERY_BATCHES):
        raise ValueError(f"{arm}, seed {seed}: {len(trained)} batches and {len(held_out)} evaluations are in {metrics.path}")
    return Outcome(
        arm=arm,
        seed=seed,
        start=held_out[0],
        rewards=held_out[1:],
        clipped=fmean(row["clip_fraction/all"] for row in trained),
        width=fmean(row["clip_range_high/all"] for row in trained),
        mean_lag=fmean(row["lag/all"] for row in trained),
    )


def less(outcomes: list[Outcome], arm: str, other: str) -> tuple[list[float], Interval]:
    """Return the differences of the score, ``arm`` less ``other``, by seed, and their interval."""
    scores = {(each.arm, each.seed): each.score for each in outcomes}
    seeds = [seed for seed in SEEDS if (arm, seed) in scores and (other, seed) in scores]
    differences = [scores[arm, seed] - scores[other, seed] for seed in seeds]
    return differences, interval(differences)


def is_ahead(outcomes: list[Outcome], arm: str, other: str) -> bool:
    """Whether ``arm`` is ahead of ``other`` by the rule: in each seed, and with an interval above 0."""
    differences, mean = less(outcomes, arm, other)
    return len(differences) == len(SEEDS) and min(differences) > 0 and mean.mean - mean.half_width > 0


def verdicts(outcomes: list[Outcome]) -> list[str]:
    """Apply the rule, which is done once every run is there."""
    missing = len(ARMS) * len(SEEDS) - len(outcomes)
    if missing:
        return [f"{missing} runs are missing: no verdict."]
    better = [arm for arm in ARMS if is_ahead(outcomes, arm, DEFAULT)]
    first = f"refuted by {', '.join(better)}" if better else "not refuted"
    _, to_fixed = less(outcomes, DEFAULT, "fixed")
    second = "shown" if is_ahead(outcomes, DEFAULT, "fixed") else "refuted" if to_fixed.mean <= 0 else "open"
    _, to_constant = less(outcomes, DEFAULT, "constant")
    apart = is_ahead(outcomes, DEFAULT, "constant") or is_ahead(outcomes, "constant", DEFAULT)
    third = "refuted" if apart else "shown" if abs(to_constant.mean) < 0.05 else "open"
    return [
        f"1. The default is not behind on a real model: {first}.",
        f"2. The paper's width is too narrow at lag 2: {second}.",
        f"3. What calibration gives is the width, without tuning: {third}.",
    ]


def masters_verdict(outcomes: list[Outcome]) -> str:
    """Apply the rule of question l, which is done once every run is there."""
    missing = len(MASTERS) * len(SEEDS) - len(outcomes)
    if missing:
        return f"{missing} runs are missing: no verdict."
    _, mean = less(outcomes, SPREAD, MIDDLE)
    verdict = "shown" if is_ahead(outcomes, SPREAD, MIDDLE) else "refuted" if mean.mean <= 0 else "open"
    return f"Spread masters learn faster: {verdict}."


def beside_float32(outcomes: list[Outcome], float32: list[Outcome]) -> list[Outcome]:
    """Return the outcomes of question l, and of question k's those that are the same in float32."""
    return [*outcomes, *(replace(each, arm="float32") for each in float32 if each.arm == DEFAULT)]


def masters_table(outcomes: list[Outcome], float32: list[Outcome]) -> str:
    """Return Markdown of question l; differences are to *middle*."""
    told = _told(beside_float32(outcomes, float32), [*MASTERS, "float32"], MIDDLE)
    return f"{told}\n\n{masters_verdict(outcomes)}"


def table(outcomes: list[Outcome]) -> str:
    """Return Markdown: a line per arm, and the verdicts."""
    return "\n".join([_told(outcomes, list(ARMS), DEFAULT), "", *verdicts(outcomes)])


def _told(outcomes: list[Outcome], arms: list[str], baseline: str) -> str:
    rows = []
    for arm in arms:
        own = sorted((each for each in outcomes if each.arm == arm), key=lambda each: each.seed)
        if not own:
            continue
        _, mean = less(outcomes, arm, baseline)
        by_seed = ", ".join(f"{each.score:.3f}" for each in own)
        apart = "-" if arm == baseline or isnan(mean.mean) else mean.text(3)
        ends = ", ".join(f"{each.rewards[-1]:.2f}" for each in own)
        clipped, width, lag = (fmean(getattr(each, name) for each in own) for name in ("clipped", "width", "mean_lag"))
        rows.append((arm, by_seed, apart, ends, f"{clipped:.0%}", f"{width:.4f}", f"{lag:.2f}"))
    heads = ["arm", "held-out reward, seeds 0, 1, 2", f"less *{baseline}*", "at the end", "clipped", "width", "mean lag"]
    return markdown(heads, rows)


if __name__ == "__main__":
    main()

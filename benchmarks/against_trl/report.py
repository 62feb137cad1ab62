"""The comparison as a table, as plain data for JSON, and as a plot."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from benchmarks.against_trl.curve import (
    Run,
    System,
    arrival,
    best_setting,
    common_samples,
    mean_arrival_s,
    mean_reward,
)
from benchmarks.watch import BUSY_CORES, said_of

GOAL: Final = 0.7
"""The goal: this project reaches the target in at most this share of TRL's seconds."""
MEMORY_GOAL: Final = 1.2
"""Of all processes together, at most so many times TRL's."""
NAMES: Final[dict[System, str]] = {"gspo": "this project", "trl": "TRL"}


@dataclass(frozen=True)
class Comparison:
    """The runs of each system's best setting, over the same seeds, and all other runs."""

    ours: tuple[Run, ...]
    theirs: tuple[Run, ...]
    others: tuple[Run, ...]
    mini_batches: int
    samples_per_batch: int

    @classmethod
    def of(cls, runs: Sequence[Run], *, mini_batches: int, samples_per_batch: int) -> Comparison:
        """Choose each system's best setting by the seeds at which all its settings ran; see ``curve.best_setting``."""
        best = {system: chosen_setting([run for run in runs if run.system == system]) for system in NAMES}
        kept = [run for run in runs if run.setting == best[run.system]]
        return cls(
            ours=tuple(run for run in kept if run.system == "gspo"),
            theirs=tuple(run for run in kept if run.system == "trl"),
            others=tuple(run for run in runs if run.setting != best[run.system]),
            mini_batches=mini_batches,
            samples_per_batch=samples_per_batch,
        )

    @property
    def target(self) -> float:
        """The held-out reward that every run was to reach."""
        return self.ours[0].target

    @property
    def others_cores(self) -> float:
        """Cores that others used during the runs, on average."""
        return fmean(run.others_cores for run in [*self.ours, *self.theirs])

    @property
    def memory_ratio(self) -> float:
        """Our peak of memory over TRL's."""
        return _ratio(*(fmean(run.peak_mib for run in runs) for runs in (self.ours, self.theirs)))

    @property
    def ratio(self) -> float:
        """Our mean seconds to the target over TRL's; NaN where either never reached it."""
        ours, theirs = mean_arrival_s(self.ours), mean_arrival_s(self.theirs)
        return ours / theirs if math.isfinite(ours) and math.isfinite(theirs) else math.nan

    @property
    def equal_samples(self) -> int:
        """The number of samples over which both rewards are compared."""
        return common_samples([*self.ours, *self.theirs])


def chosen_setting(runs: Sequence[Run]) -> str:
    """Return the best setting of one system, judged on the seeds that every setting ran."""
    seeds = set.intersection(*({each.seed for each in runs if each.setting == run.setting} for run in runs))
    return best_setting([run for run in runs if run.seed in seeds])


def table(comparison: Comparison) -> str:
    """Markdown."""
    ours, theirs = comparison.ours, comparison.theirs
    common, target = comparison.equal_samples, comparison.target
    busy = comparison.others_cores >= BUSY_CORES

    def to_target(runs: Sequence[Run], value: Callable[[Run], float | None]) -> float:
        values = [value(run) for run in runs]
        return fmean(math.inf if each is None else each for each in values)

    def seconds(run: Run) -> float | None:
        reached = arrival(run.points, run.target)
        return None if reached is None else reached.seconds

    def samples(run: Run) -> float | None:
        reached = arrival(run.points, run.target)
        return None if reached is None else float(reached.samples)

    def evaluations(run: Run) -> float | None:
        reached = arrival(run.points, run.target)
        return None if reached is None else reached.seconds - reached.seconds_without_evaluation

    steps = comparison.mini_batches / comparison.samples_per_batch
    rows = [
        (f"seconds to {target}", to_target(ours, seconds), to_target(theirs, seconds), 1),
        ("of them in evaluations alone", to_target(ours, evaluations), to_target(theirs, evaluations), 1),
        (f"samples to {target}", to_target(ours, samples), to_target(theirs, samples), 0),
        (f"optimizer steps to {target}", to_target(ours, samples) * steps, to_target(theirs, samples) * steps, 0),
        *(
            [(f"mean reward over the first {common} samples", *(_mean_rewards(runs, common) for runs in (ours, theirs)), 3)]
            if common
            else []
        ),
        ("seconds a batch", *(fmean(run.seconds / run.batches for run in runs) for runs in (ours, theirs)), 2),
        ("CPU seconds a batch", *(fmean(sum(run.cpu_s.values()) for run in runs) for runs in (ours, theirs)), 2),
        ("seconds until the first sample (not counted above)", *(fmean(r.start_s for r in x) for x in (ours, theirs)), 0),
        ("peak of memory, MiB", *(fmean(r.peak_mib for r in x) for x in (ours, theirs)), 0),
    ]
    seeds = ", ".join(str(run.seed) for run in ours)
    lines = [
        f"| seeds {seeds} | {NAMES['gspo']}, {ours[0].setting} | {NAMES['trl']}, {theirs[0].setting} | ratio |",
        "|---|---|---|---|",
    ]
    for name, mine, its, digits in rows:
        times = busy and "seconds" in name
        values = ["-", "-"] if times else [_number(mine, digits), _number(its, digits)]
        lines.append(f"| {name} | {' | '.join(values)} | {_number(_ratio(mine, its), 2)} |")
    return "\n".join(lines)


def parts_table(comparison: Comparison) -> str:
    """Return Markdown: where the time of a batch goes, and tokens per second, for every system and setting.

    On a busy machine times are shares of TRL's, and rates are left out.
    """
    busy, theirs, target = comparison.others_cores >= BUSY_CORES, comparison.theirs, comparison.target
    unit_s = fmean(run.seconds / run.batches for run in theirs) if busy else 1.0
    unit_cpu_s = fmean(sum(run.cpu_s.values()) for run in theirs) if busy else 1.0
    of, its = (" / TRL's", " of TRL's seconds") if busy else ("", " s")
    lines = [f"| run | seconds of a batch{of} | CPU seconds of a batch{of} | tokens/s | tokens |", "|---|---|---|---|---|"]
    every = [*comparison.ours, *theirs, *comparison.others]
    for system, setting in dict.fromkeys((run.system, run.setting) for run in every):
        runs = [run for run in every if (run.system, run.setting) == (system, setting)]
        cells = [_means([run.batch_parts for run in runs], 2, unit_s), _means([run.cpu_s for run in runs], 2, unit_cpu_s)]
        cells += ["-" if busy else _means([run.rates for run in runs], 0), _means([run.tokens for run in runs], 2)]
        reached = _ratio(mean_arrival_s(runs), mean_arrival_s(theirs)) if busy else mean_arrival_s(runs)
        lines.append(
            f"| {NAMES[system]}, {setting} ({_number(reached, 2 if busy else 1)}{its} to {target}) | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def learner_table(comparison: Comparison) -> str:
    """Return Markdown: this project's learner by its own profile; empty where no run made one, or the machine was busy."""
    if comparison.others_cores >= BUSY_CORES:
        return ""
    profiled = [run for run in [*comparison.ours, *comparison.others] if run.learner_parts]
    lines = ["| the learner of | seconds of a batch |", "|---|---|"] if profiled else []
    for setting in dict.fromkeys(run.setting for run in profiled):
        parts = _means([run.learner_parts for run in profiled if run.setting == setting], 2)
        lines.append(f"| {NAMES['gspo']}, {setting} | {parts} |")
    return "\n".join(lines)


def verdict(comparison: Comparison) -> str:
    """Return the result in a few sentences, with what is wrong with it."""
    if math.isnan(comparison.ratio):
        return f"No ratio: a run did not reach {comparison.target}; run more batches."
    ratio = comparison.ratio
    said = [f"Seconds to {comparison.target}: {ratio:.2f} of TRL's; the goal of {GOAL} is {_met(ratio, GOAL)}."]
    memory = comparison.memory_ratio
    if not math.isnan(memory):
        said.append(f"Memory: {memory:.2f} of TRL's; the goal of {MEMORY_GOAL} is {_met(memory, MEMORY_GOAL)}.")
    return " ".join([*said, *filter(None, [said_of(comparison.others_cores)])])


def _met(ratio: float, goal: float) -> str:
    return "met" if ratio <= goal else "missed"


def as_data(comparison: Comparison) -> dict[str, Any]:
    """Return values for JSON: every run with its curve. Ratios that do not exist are null."""
    return {
        "target": comparison.target,
        "goal": GOAL,
        "ratio": None if math.isnan(comparison.ratio) else comparison.ratio,
        "equal_samples": comparison.equal_samples,
        "ours": [asdict(run) for run in comparison.ours],
        "trl": [asdict(run) for run in comparison.theirs],
        "others": [asdict(run) for run in comparison.others],
    }


def plot(comparison: Comparison, path: Path) -> None:
    """Plot held-out reward over seconds and over samples: a thin line per seed, a thick one for their mean over samples."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (over_time, over_samples) = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    for runs, colour in ((comparison.ours, "tab:blue"), (comparison.theirs, "tab:orange")):
        label = f"{NAMES[runs[0].system]}, {runs[0].setting}"
        for index, run in enumerate(runs):
            rewards = [point.reward for point in run.points]
            name = label if index == 0 else None
            over_time.plot([point.seconds for point in run.points], rewards, ".-", color=colour, linewidth=1, label=name)
            over_samples.plot([point.samples for point in run.points], rewards, ".-", color=colour, linewidth=1, label=name)
    for axes, label in ((over_time, "seconds since the first sample"), (over_samples, "samples trained on")):
        axes.axhline(comparison.target, color="grey", linewidth=1, linestyle="--")
        axes.set(xlabel=label, ylim=(0, 1.02))
        axes.set_xlim(left=0)
    over_time.set_ylabel("held-out reward")
    over_time.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _mean_rewards(runs: Sequence[Run], samples: int) -> float:
    return fmean(mean_reward(run.points, samples) for run in runs)


def _ratio(ours: float, theirs: float) -> float:
    return ours / theirs if theirs and math.isfinite(ours) and math.isfinite(theirs) else math.nan


def _number(value: float, digits: int) -> str:
    if math.isnan(value):
        return "-"
    return "never" if math.isinf(value) else f"{value:.{digits}f}"


def _means(rows: Sequence[dict[str, float]], digits: int, unit: float = 1.0) -> str:
    names = dict.fromkeys(name for row in rows for name in row)
    return ", ".join(f"{name} {fmean(row.get(name, 0.0) for row in rows) / unit:.{digits}f}" for name in names)

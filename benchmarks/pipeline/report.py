"""The report of the measurements: figures, goals, and waits."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Final

from benchmarks.pipeline.halves import Generated, Halves, Replayed
from benchmarks.pipeline.measures import (
    CpuSample,
    Spread,
    TrainedBatch,
    cpu_shares,
    overall_rate,
    rates,
    seconds_per_batch,
    spread,
    steady,
    token_rate,
    trained_batches,
    waves,
)
from benchmarks.pipeline.processes import SCHEDULER, SERVER
from benchmarks.pipeline.run import RunRecord
from benchmarks.pipeline.timeline import Span, learner_spans, rollout_spans, share
from benchmarks.pipeline.workload import Workload
from benchmarks.watch import said_of

SGLANG: Final = (SCHEDULER, SERVER)
GOAL_OF_HALVES: Final = 0.93
GOAL_OF_SYNCHRONOUS: Final = 1.5
LEFT_OUT: Final = 2
"""Batches left out at the beginning of any run; with lag, queues must fill too."""


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """A run in its steady part."""

    tokens_per_s: Spread
    overall_tokens_per_s: float
    seconds_per_batch: Spread
    learner_trains: float
    """Shares of the time; the learner spends the rest on checkpoints and between batches."""
    learner_publishes: float
    learner_waits: float
    rollout_paused: float
    """Share of the time during which weights were replaced."""
    pause_s: Spread
    cpu: dict[str, float]
    """Cores used, by role."""
    mean_lag: float
    max_lag: float
    strays: dict[str, str]
    num_threads: int


@dataclass(frozen=True, kw_only=True)
class HalfFigures:
    """One half alone."""

    tokens_per_s: Spread
    overall_tokens_per_s: float
    cpu_us: float
    """CPU microseconds of the half itself (SGLang without its client) per action token."""


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """A run's spans, and their steady part."""

    rollout: list[Span]
    learner: list[Span]
    begin: float
    end: float


def lanes_of(record: RunRecord, max_lag: int) -> Lanes:
    """Raises: ValueError for a run that is too short."""
    kept = steady_batches(record, max_lag)
    return Lanes(
        rollout=rollout_spans(record.watch.samples, record.events("rollout-0", "weights_loaded"), SCHEDULER),
        learner=learner_spans(record.events("learner", "batch_trained"), record.rows),
        begin=kept[0].time,
        end=kept[-1].time,
    )


def steady_batches(record: RunRecord, max_lag: int) -> list[TrainedBatch]:
    """Leave out the first batches, which fill queues, and the last ones, during which nothing is generated.

    Raises: ValueError for a run that is too short.
    """
    return steady(trained_batches(record.rows), first=LEFT_OUT + max_lag, last=max_lag)


def run_figures(record: RunRecord, max_lag: int) -> RunFigures:
    """Raises: ValueError for a run that is too short."""
    kept = steady_batches(record, max_lag)
    lanes = lanes_of(record, max_lag)
    indices = {batch.index for batch in kept[1:]}
    rows = [row for row in record.rows if row["batch"] in indices]
    pauses = [span.end - span.begin for span in lanes.rollout if span.kind == "weights" and span.begin >= lanes.begin]
    return RunFigures(
        tokens_per_s=spread(rates(kept)),
        overall_tokens_per_s=overall_rate(kept),
        seconds_per_batch=spread(seconds_per_batch(kept)),
        learner_trains=share(lanes.learner, "training", lanes.begin, lanes.end),
        learner_publishes=share(lanes.learner, "publication", lanes.begin, lanes.end),
        learner_waits=share(lanes.learner, "waiting", lanes.begin, lanes.end),
        rollout_paused=share(lanes.rollout, "weights", lanes.begin, lanes.end),
        pause_s=spread(pauses),
        cpu=cpu_shares(record.watch.samples, lanes.begin, lanes.end),
        mean_lag=sum(row["lag/mean"] for row in rows) / len(rows),
        max_lag=max(row["lag/max"] for row in rows),
        strays=record.watch.strays,
        num_threads=record.watch.num_threads,
    )


def half_figures(halves: Halves, counted: Sequence[int]) -> dict[str, HalfFigures]:
    """Measure SGLang and the learner, each alone and both at once; the learner on the batches ``counted``.

    Raises: ValueError for too few requests.
    """
    at_once = [batch for batch in halves.learner_at_once.batches if batch.index in counted]
    return {
        "sglang": sglang_figures(halves.sglang, halves.samples, 0.0, halves.sglang.end),
        "learner": learner_figures(halves.learner, counted, halves.samples),
        "sglang_at_once": sglang_figures(halves.sglang_at_once, halves.samples, at_once[0].time, at_once[-1].time),
        "learner_at_once": learner_figures(halves.learner_at_once, counted, halves.samples),
    }


def sglang_figures(generated: Generated, samples: Sequence[CpuSample], begin: float, end: float) -> HalfFigures:
    """Measure the arrivals between two moments, by waves. Raises: ValueError for too few requests."""
    marks = waves(generated.answered, generated.at_a_time, begin, end)
    if len(marks) < 2:
        raise ValueError(
            f"{len(generated.answered)} requests were answered, {generated.at_a_time} at a time: at least three times "
            "as many are needed; generate for more batches"
        )
    rate = token_rate(generated.arrivals, marks[0], marks[-1])
    return HalfFigures(
        tokens_per_s=spread([token_rate(generated.arrivals, left, right) for left, right in pairwise(marks)]),
        overall_tokens_per_s=rate,
        cpu_us=cpu_us_per_token(cpu_shares(samples, marks[0], marks[-1]), SGLANG, rate),
    )


def learner_figures(replayed: Replayed, counted: Sequence[int], samples: Sequence[CpuSample]) -> HalfFigures:
    """Measure on the batches ``counted``, of which the first is only the starting line."""
    kept = [batch for batch in replayed.batches if batch.index in counted]
    rate = overall_rate(kept)
    used = cpu_shares(samples, kept[0].time, kept[-1].time)
    return HalfFigures(
        tokens_per_s=spread(rates(kept)), overall_tokens_per_s=rate, cpu_us=cpu_us_per_token(used, ("learner",), rate)
    )


def cpu_us_per_token(cores_used: Mapping[str, float], roles: Sequence[str], tokens_per_s: float) -> float:
    """Return CPU microseconds of some roles per token: the cost, however long it waits for a core."""
    return 1e6 * sum(cores_used.get(role, 0.0) for role in roles) / tokens_per_s


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All measurements and what follows from them; ratios are of medians."""

    sglang: HalfFigures
    learner: HalfFigures
    sglang_at_once: HalfFigures
    """Measured while the learner alone trains on the other cores."""
    learner_at_once: HalfFigures
    whole: RunFigures
    synchronous: RunFigures
    workload: Workload | str
    """What was run: sizes, or a configuration."""
    max_lag: int
    same_weights: bool
    """Whether the learner alone made the run's weights bit for bit, and so did the same work."""
    others_cores: float = 0.0
    """Cores that others used meanwhile, on average."""

    @property
    def of_slower_half(self) -> float:
        return self.whole.tokens_per_s.median / min(self.sglang.tokens_per_s.median, self.learner.tokens_per_s.median)

    @property
    def of_slower_half_at_once(self) -> float:
        slower = min(self.sglang_at_once.tokens_per_s.median, self.learner_at_once.tokens_per_s.median)
        return self.whole.tokens_per_s.median / slower

    @property
    def of_synchronous(self) -> float:
        return self.whole.tokens_per_s.median / self.synchronous.tokens_per_s.median

    @property
    def balance(self) -> float:
        """Seconds of generation per second of training, for the same batch: 1 is even."""
        return self.learner.tokens_per_s.median / self.sglang.tokens_per_s.median

    @property
    def most_gain(self) -> float:
        """The most that asynchrony could gain with this balance, with nothing but generation and training: at most 2."""
        return (1 + self.balance) / max(1, self.balance)

    def as_json(self) -> dict[str, Any]:
        """Return all values, derived ones included."""
        derived = {
            "of_slower_half": self.of_slower_half,
            "of_slower_half_at_once": self.of_slower_half_at_once,
            "of_synchronous": self.of_synchronous,
            "balance": self.balance,
            "most_gain": self.most_gain,
        }
        return asdict(self) | derived


def tables(found: Comparison) -> str:
    """Return Markdown tables: the results, and where the time goes; on a busy machine as ratios alone."""
    said = said_of(found.others_cores)
    unit = found.learner.tokens_per_s.median if said else 1.0
    measured: list[tuple[str, HalfFigures | RunFigures]] = [
        ("1. SGLang alone", found.sglang),
        ("2. learner alone, with publication", found.learner),
        ("1 while 2 is at work", found.sglang_at_once),
        ("2 while 1 is at work", found.learner_at_once),
        (f"3. the whole, max_lag {found.max_lag}", found.whole),
        ("4. the whole, max_lag 0", found.synchronous),
    ]
    ratios = [
        ("**3 of the slower of 1 and 2**", found.of_slower_half, goal_word(found.of_slower_half, GOAL_OF_HALVES)),
        ("3 of the slower of 1 and 2, both at work", found.of_slower_half_at_once, ""),
        ("**3 of 4**", found.of_synchronous, goal_word(found.of_synchronous, GOAL_OF_SYNCHRONOUS)),
        ("seconds of generation to one of training", found.balance, ""),
        ("so 3 of 4 can be at most", found.most_gain, ""),
    ]
    digits = 2 if said else 0
    lines = [
        f"| action tokens per second{' / those of 2' if said else ''} | median (quartiles) | all together |",
        "|---|---|---|",
    ]
    lines += [
        f"| {name} | {_spread(of.tokens_per_s, unit, digits)} | {of.overall_tokens_per_s / unit:,.{digits}f} |"
        for name, of in measured
    ]
    lines += ["", "| ratio of medians | | goal |", "|---|---|---|"]
    lines += [f"| {name} | {value:.2f} | {goal} |" for name, value, goal in ratios]
    return "\n".join([*lines, "", *_where(found), *(["", said] if said else [])])


def goal_word(value: float, goal: float) -> str:
    """Tell in words whether a goal is met."""
    return f"at least {goal}: {'met' if value >= goal else 'missed'}"


def _where(found: Comparison) -> list[str]:
    runs, busy = (found.whole, found.synchronous), bool(said_of(found.others_cores))
    roles = sorted({role for run in runs for role in run.cpu})
    cells: list[tuple[str, list[str]]] = [
        ("learner trains", [f"{run.learner_trains:.0%}" for run in runs]),
        ("learner publishes", [f"{run.learner_publishes:.0%}" for run in runs]),
        ("learner waits for a batch, or saves a checkpoint", [f"{run.learner_waits:.0%}" for run in runs]),
        ("generation is paused for weights", [f"{run.rollout_paused:.0%}" for run in runs]),
        *(
            []
            if busy
            else [
                ("a pause (s)", [f"{run.pause_s.median:.2f}" for run in runs]),
                ("a batch (s)", [f"{run.seconds_per_batch.median:.1f}" for run in runs]),
            ]
        ),
        ("lag: mean, most", [f"{run.mean_lag:.2f}, {run.max_lag:.0f}" for run in runs]),
        *((f"cores used: {role}", [f"{run.cpu.get(role, 0.0):.2f}" for run in runs]) for role in roles),
    ]
    costs = [
        (name, half.cpu_us, [cpu_us_per_token(run.cpu, roles_of, run.overall_tokens_per_s) for run in runs])
        for name, half, roles_of in (("SGLang", found.sglang, SGLANG), ("learner", found.learner, ("learner",)))
    ]
    unit = "time" if busy else "microseconds"
    return [
        f"| share of the time | max_lag {found.max_lag} | max_lag 0 |",
        "|---|---|---|",
        *(f"| {name} | {' | '.join(values)} |" for name, values in cells),
        "",
        f"| processor {unit} for an action token | alone | max_lag {found.max_lag} | max_lag 0 |",
        "|---|---|---|---|",
        *(
            f"| {name} | {' | '.join(f'{each / alone:.2f}' if busy else f'{each:,.0f}' for each in (alone, *whole))} |"
            for name, alone, whole in costs
        ),
    ]


def _spread(value: Spread, unit: float, digits: int) -> str:
    median, low, high = (f"{each / unit:,.{digits}f}" for each in (value.median, value.low, value.high))
    return f"{median} ({low} to {high})"

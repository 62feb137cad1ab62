"""A run in a few numbers, and several runs in a mean with a confidence interval; pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from benchmarks.study.run_record import RunRecord
from gspo_services.shared.eval_metrics import t_quantile

TARGET = 0.5
"""The timed gain, as a share of the reward missing at the start, because start models differ in skill."""
DIGITS = 5
COLLAPSE_SHARE = 0.5

_SERIES = ("reward", "clip")
_SUMS = ("cpu_sample_s", "cpu_reference_s", "cpu_train_s", "cpu_diagnosis_s", "cpu_eval_s")
_NOT_MEANS = ("batch", "eval", "tokens", "diverged", *_SERIES, *_SUMS)


class Interval(NamedTuple):
    """A mean over ``num`` runs and the half width of its 95 % confidence interval; NaN for a single run."""

    mean: float
    half_width: float
    num: int

    def __str__(self) -> str:
        return self.text(2)

    def text(self, digits: int) -> str:
        """ "0.83 ± 0.05"; without interval where there is none."""
        if self.num == 0:
            return "-"
        if math.isnan(self.half_width):
            return f"{self.mean:.{digits}f}"
        return f"{self.mean:.{digits}f} ± {self.half_width:.{digits}f}"


def interval(values: Sequence[float]) -> Interval:
    """Return the mean and Student's 95 % half width, t * s / sqrt(n)."""
    num = len(values)
    if num == 0:
        return Interval(math.nan, math.nan, 0)
    mean = math.fsum(values) / num
    if num == 1:
        return Interval(mean, math.nan, 1)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (num - 1))
    return Interval(mean, t_quantile(num - 1) * deviation / math.sqrt(num), num)


@dataclass(frozen=True)
class RunSummary:
    """The kept figures of a run: enough for every table and plot, a hundredth of a record."""

    config: dict[str, Any]
    """What differs from the defaults, and the required fields."""
    run_id: str
    evals: list[tuple[int, float]]
    """Number of batches trained before, and the held-out sampled reward."""
    reward: list[float]
    """Mean reward of each batch's own samples."""
    clip: list[float]
    tokens: list[int]
    """Action tokens trained on before each evaluation."""
    cpu: list[float]
    """CPU seconds of sampling, reference pass and training before each evaluation."""
    means: dict[str, float]
    """Means of every other number, over the batches in which it was measured."""
    sums: dict[str, float]
    diverged: bool
    changed: list[float] = field(default_factory=list)
    """Share of the experts that a whole batch's updates changed, at each evaluation but the last; empty: not measured."""
    digests: dict[str, str] = field(default_factory=dict)
    """Of the weights at the "start" and the "end"; empty in runs of before 2026-11-26."""

    @property
    def area(self) -> float:
        """Held-out reward averaged over the evaluations after the start; 0 for those that a diverged run misses."""
        expected = -(-self.num_batches // self.eval_every)
        return sum(reward for batch, reward in self.evals if batch > 0) / expected

    @property
    def final(self) -> float:
        """Mean of the last two held-out rewards; 0 for a diverged run."""
        return 0.0 if self.diverged else sum(reward for _, reward in self.evals[-2:]) / len(self.evals[-2:])

    @property
    def batches_to_target(self) -> int | None:
        """Batches trained when a measurement first showed TARGET of the missing held-out reward gained; None: never."""
        goal = self.evals[0][1] + TARGET * (1 - self.evals[0][1])
        return next((batch for batch, reward in self.evals if reward >= goal), None)

    @property
    def sampled(self) -> float:
        """Reward of the training samples, averaged over the run; at lag 0 that of the policy itself."""
        return sum(self.reward) / max(1, len(self.reward))

    @property
    def collapsed(self) -> bool:
        """Diverged, or ended below half of its best or below its start."""
        best = max(reward for _, reward in self.evals)
        return self.diverged or self.final < max(COLLAPSE_SHARE * best, self.evals[0][1])

    @property
    def worst_drop(self) -> float:
        """The largest fall of the held-out reward from its best so far; a diverged run falls to 0."""
        best = worst = 0.0
        for reward in [reward for _, reward in self.evals] + [0.0] * self.diverged:
            best = max(best, reward)
            worst = max(worst, best - reward)
        return worst

    @property
    def mean_clip(self) -> float:
        return sum(self.clip) / max(1, len(self.clip))

    @property
    def num_batches(self) -> int:
        return int(self.config["num_batches"])

    @property
    def eval_every(self) -> int:
        return int(self.config["eval_every"])

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for a line of JSON, without ``changed`` and ``digests`` where there are none."""
        return {name: value for name, value in asdict(self).items() if value or name not in ("changed", "digests")}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunSummary:
        """Invert ``as_dict``. Raises: TypeError for other fields."""
        return cls(**{**values, "evals": [(int(batch), float(reward)) for batch, reward in values["evals"]]})


def summarise_run(record: RunRecord) -> RunSummary:
    """Condense a finished run."""
    evals, tokens, cpu = [], [], []
    spent, trained = 0.0, 0
    collected: dict[str, list[float]] = {}
    sums = dict.fromkeys(_SUMS, 0.0)
    for row in record.batches:
        if "eval" in row:
            evals.append((int(row["batch"]), round(row["eval"], DIGITS)))
            tokens.append(trained)
            cpu.append(round(spent, 2))
        spent += sum(row.get(name, 0.0) for name in ("cpu_sample_s", "cpu_reference_s", "cpu_train_s"))
        trained = int(row.get("tokens", trained))
        for name in _SUMS:
            sums[name] += row.get(name, 0.0)
        for name, value in row.items():
            if name not in _NOT_MEANS:
                collected.setdefault(name, []).append(value)
    return RunSummary(
        config=record.config,
        run_id=record.run_id,
        evals=evals,
        reward=[round(row["reward"], 3) for row in record.batches if "reward" in row],
        clip=[round(row["clip"], DIGITS) for row in record.batches if "clip" in row],
        tokens=tokens,
        cpu=cpu,
        means={name: _rounded(math.fsum(values) / len(values)) for name, values in sorted(collected.items())},
        sums={name: round(value, 2) for name, value in sums.items()},
        diverged=any("diverged" in row for row in record.batches),
        changed=[round(row["changed_after"], DIGITS) for row in record.batches if "changed_after" in row],
        digests=record.digests,
    )


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")

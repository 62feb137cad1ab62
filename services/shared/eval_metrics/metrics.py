"""Metrics of an evaluation set by name: reward, avg@k, pass@k, maj@k, elo."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from gspo_services.shared.eval_metrics.counting import majority_at_k, pass_at_k
from gspo_services.shared.eval_metrics.intervals import Interval, mean_interval, share_interval
from gspo_services.shared.eval_metrics.rating import Attempts, elo_rating

MetricKind = Literal["reward", "avg", "pass", "maj", "elo"]
Remark = Literal["", "all_solved", "none_solved", "no_samples"]
FORMS: Final = "reward, avg@k, pass@k, maj@k (k a number, such as pass@8) and elo"
MAX_SAMPLES: Final = 1024
"""The most samples of one task: counting the votes of more would take long."""
_WITH_K: Final = re.compile(r"(avg|pass|maj)@(-?\d{1,9})")


class ScoreMetric(NamedTuple):
    """One metric."""

    name: str
    kind: MetricKind
    k: int
    """The number of samples of a task that it needs; 1 if the name has no k."""


@dataclass(frozen=True, kw_only=True)
class TaskSamples:
    """The finished samples of one task. Attempts that failed for a fault that is not the model's are excluded."""

    rewards: Sequence[float]
    solved: Sequence[bool]
    answers: Sequence[str | None]
    """The vote of each sample; None: no vote."""
    rating: float | None = None
    """The task's difficulty on Elo's scale."""


class Estimate(NamedTuple):
    """The value of a metric with its 95 % interval."""

    metric: str
    value: float | None
    """None: see ``remark``."""
    low: float | None
    high: float | None
    num_tasks: int
    """The number of tasks in it: those with enough samples."""
    remark: Remark = ""
    """Why there is no value: an Elo rating has none if everything or nothing was solved."""


def metric_named(name: str) -> ScoreMetric:
    """Raises: ValueError for what is no metric, with those that there are."""
    if name == "reward":
        return ScoreMetric(name, "reward", 1)
    if name == "elo":
        return ScoreMetric(name, "elo", 1)
    found = _WITH_K.fullmatch(name)
    if found is None:
        raise ValueError(f"{name[:64]!r} is no metric: there are {FORMS}")
    kind, k = found.groups()
    if int(k) < 1:
        raise ValueError(f"{name}: k is {int(k)}: expected at least 1")
    match kind:
        case "avg":
            return ScoreMetric(name, "avg", int(k))
        case "pass":
            return ScoreMetric(name, "pass", int(k))
        case _:
            return ScoreMetric(name, "maj", int(k))


def default_metrics(num_samples: int, *, has_answers: bool, has_ratings: bool) -> tuple[str, ...]:
    """Return the useful metrics of a set with so many samples of each task."""
    names = ["reward", f"avg@{num_samples}"]
    if num_samples > 1:
        names.append(f"pass@{num_samples}")
        names += [f"maj@{num_samples}"] if has_answers else []
    return (*names, *(["elo"] if has_ratings else []))


def require_samples(metrics: Sequence[str], num_samples: int) -> None:
    """Raises: ValueError for a metric that so many samples of each task do not give, or one that is named twice."""
    for name in metrics:
        metric = metric_named(name)
        if metric.k > num_samples:
            raise ValueError(
                f"{name} needs {metric.k} samples of each task, and there will be {num_samples}: "
                f"set samples to {metric.k} or more, or take a k up to {num_samples}"
            )
        if list(metrics).count(name) > 1:
            raise ValueError(f"{name} is named twice: name it once")


def estimate(name: str, tasks: Sequence[TaskSamples]) -> Estimate:
    """Estimate the metric over ``tasks``. Each task with k or more finished samples counts the same.

    reward      the mean reward of a sample: Wilson's interval where all rewards are in [0, 1], Student's otherwise
    avg@k       the mean share of solved samples; the mean over all subsets of k is that over all samples
    pass@k      see ``pass_at_k``
    maj@k       see ``majority_at_k``
    elo         see ``elo_rating``; tasks with a rating count

    Raises: ValueError for what is no metric.
    """
    metric = metric_named(name)
    if metric.kind == "elo":
        return _elo(name, tasks)
    fitting = [task for task in tasks if len(task.rewards) >= metric.k]
    if not fitting:
        return Estimate(name, None, None, None, 0, "no_samples")
    values = [value_of(metric, task) for task in fitting]
    num_samples = sum(len(task.rewards) for task in fitting)
    in_range = metric.kind != "reward" or all(0 <= reward <= 1 for task in fitting for reward in task.rewards)
    found: Interval = share_interval(values, num_samples) if in_range else mean_interval(values)
    return Estimate(name, found.value, found.low, found.high, len(fitting))


def value_of(metric: ScoreMetric, task: TaskSamples) -> float:
    """The metric of one task that has at least k samples; not of ``elo``, which a single task does not have."""
    match metric.kind:
        case "reward":
            return sum(task.rewards) / len(task.rewards)
        case "avg":
            return sum(task.solved) / len(task.solved)
        case "pass":
            return pass_at_k(len(task.solved), sum(task.solved), metric.k)
        case "maj":
            return majority_at_k(task.answers, task.solved, metric.k)
        case "elo":
            raise ValueError("elo is a metric of all tasks together: there is none of a single task")


def _elo(name: str, tasks: Sequence[TaskSamples]) -> Estimate:
    attempts = [
        Attempts(each.rating, len(each.solved), sum(each.solved))
        for each in tasks
        if each.rating is not None and each.solved
    ]
    if not attempts:
        return Estimate(name, None, None, None, 0, "no_samples")
    rating = elo_rating(attempts)
    remark: Remark = "" if rating.kind == "estimated" else rating.kind
    return Estimate(name, rating.value, rating.low, rating.high, len(attempts), remark)

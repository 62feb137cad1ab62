"""Computes the results of one model on one set: metrics with intervals, and the cost of the samples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gspo_services.runs.eval.models import ScoredModel
from gspo_services.runs.eval.samples import SampleFile, ScoredSample
from gspo_services.runs.eval.sets import ScoredSet
from gspo_services.shared.eval_metrics import (
    Estimate,
    Interval,
    TaskSamples,
    difference_interval,
    estimate,
    metric_named,
    value_of,
)
from gspo_services.shared.runtime.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class SetResult:
    """The result of one model on one set."""

    model: ScoredModel
    set_name: str
    estimates: tuple[Estimate, ...]
    per_task: Mapping[str, Mapping[int, float]]
    """The value of each metric except elo, for each task with enough samples."""
    num_samples: int
    num_failed: int
    """Samples without a reward, for a fault that is not the model's. They count in no metric."""
    first_failure: str
    cut_off: float | None
    """The share of samples that a length limit ended."""
    num_action_tokens: int
    engine_s: float

    @property
    def batch(self) -> int | None:
        """Batches that the weights were trained on; None for a directory."""
        return None if self.model.checkpoint is None else self.model.checkpoint.batch_position

    def lines(self) -> list[Mapping[str, Any]]:
        """Return one line of results.jsonl for each metric."""
        common = {
            "model": self.model.label,
            "path": str(self.model.directory if self.model.checkpoint is None else self.model.run),
            "batch": self.batch,
            "set": self.set_name,
        }
        cost = {
            "num_samples": self.num_samples,
            "num_failed": self.num_failed,
            "cut_off": self.cut_off,
            "num_action_tokens": self.num_action_tokens,
            "engine_s": round(self.engine_s, 3),
        }
        return [{**common, **each._asdict(), **cost} for each in self.estimates]


def result_of(model: ScoredModel, chosen: ScoredSet, samples: SampleFile) -> SetResult:
    """Compute the result over the samples that the set asks for. Samples taken earlier for a larger set do not count."""
    known = known_samples(chosen, samples)
    finished = [each for each in known if each.reward is not None]
    failed = [each for each in known if each.reward is None]
    by_task = {task.index: _of_task([each for each in finished if each.task == task.index], chosen) for task in chosen.tasks}
    per_task = {}
    for name in chosen.metrics:
        metric = metric_named(name)
        if metric.kind != "elo":
            fitting = {index: each for index, each in by_task.items() if len(each.rewards) >= metric.k}
            per_task[name] = {index: value_of(metric, each) for index, each in fitting.items()}
    return SetResult(
        model=model,
        set_name=chosen.name,
        estimates=tuple(estimate(name, list(by_task.values())) for name in chosen.metrics),
        per_task=per_task,
        num_samples=len(finished),
        num_failed=len(failed),
        first_failure=failed[0].failure if failed else "",
        cut_off=sum(each.end == "length" for each in finished) / len(finished) if finished else None,
        num_action_tokens=sum(each.num_action_tokens for each in known),
        engine_s=samples.engine_s,
    )


def known_samples(chosen: ScoredSet, samples: SampleFile) -> list[ScoredSample]:
    """Return the set's existing samples. Raises: ConfigurationError when a task is not the one that was sampled."""
    found = []
    for task in chosen.tasks:
        for number in range(chosen.terms.samples):
            sample = samples.samples.get((task.index, number))
            if sample is None:
                continue
            if sample.task_digest != task.digest:
                raise ConfigurationError(
                    f"set {chosen.name}: task {task.index} is not the one that was sampled before: its data has changed; "
                    "sample anew with --out DIR"
                )
            found.append(sample)
    return found


def change(before: SetResult, after: SetResult, metric: str) -> Interval | None:
    """Return how much higher ``after`` is, over the tasks that both have; None for a metric without values per task."""
    old, new = before.per_task.get(metric, {}), after.per_task.get(metric, {})
    common = sorted(old.keys() & new.keys())
    return difference_interval([old[task] for task in common], [new[task] for task in common]) if common else None


def _of_task(samples: Sequence[ScoredSample], chosen: ScoredSet) -> TaskSamples:
    rewards = [each.reward for each in samples if each.reward is not None]
    return TaskSamples(
        rewards=rewards,
        solved=[reward >= chosen.terms.solved_at for reward in rewards],
        answers=_votes(samples, chosen),
        rating=samples[0].rating if samples else None,
    )


def _votes(samples: Sequence[ScoredSample], chosen: ScoredSet) -> list[str | None]:
    """The answers, those that mean the same by one text. Raises: ConfigurationError for an environment that fails."""
    answers = [each.answer for each in samples]
    environment = chosen.environment
    if environment is None or not samples or not any(metric_named(name).kind == "maj" for name in chosen.metrics):
        return answers
    task = next(each.task for each in chosen.tasks if each.index == samples[0].task)
    first: dict[str, str] = {}
    for answer in answers:
        if answer is not None and answer not in first:
            try:
                known = (each for each in dict.fromkeys(first.values()) if environment.is_same_answer(task, each, answer))
                first[answer] = next(known, answer)
            # The user's own code.
            except Exception as error:
                raise ConfigurationError(
                    f"set {chosen.name}: environment is_same_answer failed: {type(error).__name__}: {error}"
                ) from error
    return [None if answer is None else first[answer] for answer in answers]

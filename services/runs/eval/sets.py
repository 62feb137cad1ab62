"""Opens the sets to score: their tasks and their metrics."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from gspo.tasks.environments import Environment, Task, TaskSet, TaskSource
from gspo_protocol.limits import MAX_TASK_BYTES
from gspo_protocol.messages.base import require_plain
from gspo_services.runs.local_play import of_the_configuration
from gspo_services.shared.eval_metrics import default_metrics, require_samples
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import ONLY_SET, EvaluationSet, Settings, told_settings
from gspo_services.tasks.environments import create_environment, create_task_set


@dataclass(frozen=True, kw_only=True)
class ScoredTask:
    """One task of a set."""

    index: int
    task: Task
    digest: str
    rating: float | None


@dataclass(frozen=True, kw_only=True)
class ScoredSet:
    """One set with its tasks."""

    name: str
    terms: EvaluationSet
    settings: Settings
    """The run's settings, with the set's environment and sampling."""
    tasks: Sequence[ScoredTask]
    metrics: tuple[str, ...]
    environment: Environment | None
    """None if agents play."""

    def header(self) -> Mapping[str, Any]:
        """Return what its samples depend on, besides the model. Their number is not included: more may be taken later."""
        told = told_settings(self.settings)
        agent = {key: value for key, value in told["agent"].items() if key not in ("port", "host")}
        if variables := self.settings.agent.environment:
            # Samples depend on them, and they may be secret.
            agent["environment"] = blake2b(json.dumps(variables, sort_keys=True).encode(), digest_size=16).hexdigest()
        return {
            "set": self.name,
            "dtype": self.settings.model.dtype,
            "template_arguments": self.settings.model.template_arguments,
            "show_special_tokens": self.settings.model.show_special_tokens,
            "split": self.terms.split,
            "environment": told["environment"],
            "sampling": told["sampling"],
            "agent": agent if self.settings.agent.is_used else None,
            "reward_model": self.settings.reward.model or None,
            "seed": self.settings.run.seed,
        }


def named_sets(settings: Settings) -> dict[str, EvaluationSet]:
    """Return the configuration's sets; if none is named, one set: the run's held-out tasks, sampled as in training."""
    return settings.evaluation.sets or {ONLY_SET: EvaluationSet(num_tasks=settings.evaluation.num_tasks)}


def chosen_sets(settings: Settings, only: Sequence[str], changes: Mapping[str, Any]) -> dict[str, EvaluationSet]:
    """Return the sets called ``only``, or all, with some of their keys changed. Raises: ConfigurationError."""
    known = named_sets(settings)
    for name in only:
        if name not in known:
            raise ConfigurationError(f"--only {name}: there is no such set; there are: {', '.join(known)}")
        if list(only).count(name) > 1:
            raise ConfigurationError(f"--only {name}: named twice: name each set once")
    return {name: each.model_copy(update=dict(changes)) for name, each in known.items() if not only or name in only}


def open_set(settings: Settings, name: str, terms: EvaluationSet) -> ScoredSet:
    """Open the set with its tasks. Raises: ConfigurationError that names the set and the fault."""
    of_set = settings.for_set(terms)
    source_name = of_set.environment.name
    what = f'set {name}, environment "{source_name}"'
    with of_the_configuration(what):
        create = create_task_set if settings.agent.is_used else create_environment
        found: TaskSet = create(source_name, of_set.environment.options)
        source = found.tasks(terms.split)
        tasks = [_task(source, index) for index in range(_number(settings, source, terms))]
    if not tasks:
        raise ConfigurationError(f'{what}: there is no task in the split "{terms.split}": check its options')
    environment = found if isinstance(found, Environment) and not settings.agent.is_used else None
    has_answers = environment is not None and environment.has_answers
    has_ratings = any(task.rating is not None for task in tasks)
    metrics = tuple(terms.metrics) or default_metrics(terms.samples, has_answers=has_answers, has_ratings=has_ratings)
    try:
        require_samples(metrics, terms.samples)
    except ValueError as error:
        raise ConfigurationError(f"set {name}: {error}") from error
    if not has_answers and (voted := [metric for metric in metrics if metric.startswith("maj@")]):
        who = "an agent" if environment is None else f'environment "{source_name}"'
        raise ConfigurationError(
            f"set {name}: it has no {voted[0]}: {who} does not say what an episode's answer is (Environment.answer); omit "
            "the metric"
        )
    if "elo" in metrics and not has_ratings:
        raise ConfigurationError(
            f'set {name}: it has no elo: none of its {len(tasks)} tasks has a number in the field "rating"; omit the '
            "metric, or add ratings to the tasks (for files of rows: name the column in task_columns)"
        )
    return ScoredSet(name=name, terms=terms, settings=of_set, tasks=tasks, metrics=metrics, environment=environment)


def _number(settings: Settings, source: TaskSource, terms: EvaluationSet) -> int:
    if source.num_tasks is None:
        return terms.num_tasks or settings.evaluation.num_tasks
    return min(terms.num_tasks or source.num_tasks, source.num_tasks)


def _task(source: TaskSource, index: int) -> ScoredTask:
    task = dict(source.task(index))
    require_plain(f"task {index}", task, MAX_TASK_BYTES)
    canonical = json.dumps(task, sort_keys=True, ensure_ascii=True)
    return ScoredTask(
        index=index,
        task=task,
        digest=hashlib.blake2b(canonical.encode(), digest_size=8).hexdigest(),
        rating=rating_of(task),
    )


def rating_of(task: Task) -> float | None:
    """Return how hard a task is on Elo's scale: its field ``rating``. None: it has none."""
    rating = task.get("rating")
    return float(rating) if isinstance(rating, int | float) and not isinstance(rating, bool) else None

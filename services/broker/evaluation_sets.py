"""The sets that a run evaluates: their tasks, and what the ledger must know about them."""

from collections.abc import Mapping

import structlog

from gspo.tasks.environments import TaskSet, TaskSource
from gspo_services.broker.ledger import SetTerms
from gspo_services.shared.eval_metrics import default_metrics
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.schedules import sampling_of
from gspo_services.shared.settings import Evaluation, EvaluationSet, Settings
from gspo_services.tasks.environments import create_environment, create_task_set

log = structlog.get_logger()


def open_sets(settings: Settings) -> tuple[Mapping[str, TaskSource], tuple[SetTerms, ...]]:
    """The tasks of each named set of the run ("eval/" and its name), and its terms.

    Raises: ConfigurationError that names the set and what is wrong with it.
    """
    sources: dict[str, TaskSource] = {}
    found = []
    for name, each in settings.evaluation.in_runs().items():
        sources[f"eval/{name}"] = source = _tasks(settings, name, each)
        found.append(_terms(settings, name, each, source))
    return sources, tuple(found)


def _tasks(settings: Settings, name: str, chosen: EvaluationSet) -> TaskSource:
    environment = settings.for_set(chosen).environment
    create = create_task_set if settings.agent.is_used else create_environment
    try:
        task_set: TaskSet = create(environment.name, environment.options)
        source = task_set.tasks(chosen.split)
    except (ValueError, OSError) as error:
        raise ConfigurationError(f'evaluation.sets.{name}, environment "{environment.name}": {error}') from error
    if source.num_tasks == 0:
        raise ConfigurationError(
            f'evaluation.sets.{name}, environment "{environment.name}": there is no task in the split "{chosen.split}": '
            "check its options"
        )
    return source


def _terms(settings: Settings, name: str, chosen: EvaluationSet, source: TaskSource) -> SetTerms:
    wanted = chosen.num_tasks or source.num_tasks or settings.evaluation.num_tasks
    num_tasks = wanted if source.num_tasks is None else min(wanted, source.num_tasks)
    needs_ratings = not chosen.metrics or "elo" in chosen.metrics
    ratings = tuple(_rating(source, index) for index in range(num_tasks)) if needs_ratings else ()
    has_ratings = any(rating is not None for rating in ratings)
    if "elo" in chosen.metrics and not has_ratings:
        raise ConfigurationError(
            f'evaluation.sets.{name}: it has no elo: none of its {num_tasks} tasks has a number in the field "rating"; '
            "leave the metric out, or have the tasks carry it (for files of rows: name the column in task_columns)"
        )
    metrics = tuple(chosen.metrics) or default_metrics(chosen.samples, has_answers=False, has_ratings=has_ratings)
    if left_out := [metric for metric in metrics if metric.startswith("maj@")]:
        log.info("metric_not_in_runs", set=name, metrics=left_out, remedy="gspo eval measures it: a run records no answers")
    best_set, best_metric = _best(settings.evaluation)
    return SetTerms(
        name=name,
        every_batches=settings.evaluation.interval(chosen),
        num_tasks=num_tasks,
        samples=chosen.samples,
        metrics=tuple(dict.fromkeys(["reward", *(metric for metric in metrics if metric not in left_out)])),
        solved_at=chosen.solved_at,
        ratings=ratings,
        best_by=best_metric if name == best_set else "",
        sampling=sampling_of(settings.for_set(chosen).sampling) if chosen.has_own_sampling else None,
    )


def _best(evaluation: Evaluation) -> tuple[str, str]:
    """The set and the metric by which the best checkpoint is chosen."""
    name, _, metric = evaluation.best_by.partition("/")
    return name or next(iter(evaluation.in_runs()), ""), metric or "reward"


def _rating(source: TaskSource, index: int) -> float | None:
    # The user's own code: a task that cannot be made is a failed attempt when it is leased.
    try:
        rating = source.task(index).get("rating")
    except Exception as error:  # noqa: BLE001
        log.warning("task_failed", task_index=index, error=f"{type(error).__name__}: {error}")
        return None
    return float(rating) if isinstance(rating, int | float) and not isinstance(rating, bool) else None

"""Reads the metrics.jsonl of a run: finished, active, interrupted, or with damaged lines."""

from dataclasses import dataclass, field
from pathlib import Path

from gspo_services.broker.metrics_file import METRICS_FILE
from gspo_services.runs.metrics.events import HeldOut, SetScores, held_out, set_scores
from gspo_services.runs.metrics.follower import Damage, MetricsFollower
from gspo_services.runs.metrics.rows import Row, count
from gspo_services.shared.learning import LearningWatch, counted_components
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import read_run_settings, several_brokers_in


class NoMetrics(ConfigurationError):
    """metrics.jsonl is missing or cannot be read; the text has the reason and what to do."""


@dataclass(frozen=True, kw_only=True)
class RunMetrics:
    """The lines of a run."""

    path: Path
    batches: list[Row]
    """One row for each trained batch, in order; the last one if a batch was trained again."""
    evaluations: list[HeldOut]
    """By batches trained, then version. Evaluations in which no task was finished are missing."""
    sets: list[SetScores]
    """Results of named sets, in file order; the last one if a set was evaluated again after the same batches."""
    events: list[tuple[int, Row]]
    """Other events, and repeated trainings of a batch, each with the batch that it is about; if it names
    none, with the batch before it."""
    damage: tuple[Damage, ...]
    """What is left out, if lines are damaged."""
    learning: LearningWatch = field(default_factory=LearningWatch)
    """Whether the run learns, after all its lines."""

    @property
    def num_damaged(self) -> int:
        return sum(each.num_lines for each in self.damage)


def read_metrics(directory: Path) -> RunMetrics:
    """Read the metrics.jsonl of the run in ``directory``. A last line that is still being written is not damaged.

    Raises: NoMetrics.
    """
    if reason := several_brokers_in(directory):
        raise NoMetrics(reason)
    path = directory / METRICS_FILE
    if not path.exists():
        what = "the broker writes it when it starts" if directory.is_dir() else "there is no such directory"
        raise NoMetrics(f"{path}: missing: {what}")
    batches: dict[int, Row] = {}
    evaluations: dict[tuple[int, int], HeldOut] = {}
    sets: dict[tuple[str, int], SetScores] = {}
    events: list[tuple[int, Row]] = []
    learning = learning_watch(directory)
    follower = MetricsFollower(path)
    batch = 0
    for row in _rows(follower):
        event, named = row["event"], count(row, "batch")
        learning.take(row)
        if event == "batch":
            batch = row["batch"]
            batches[batch] = row
            events += [(batch, row)] if row.get("again") else []
        elif event == "evaluation":
            scores = set_scores(row)
            sets[scores.name, scores.batch] = scores
        elif event != "eval":
            events.append((batch if named is None else named, row))
        elif (found := held_out(row)) is not None:
            evaluations[found.batch, found.policy_version] = found
    return RunMetrics(
        path=path,
        batches=[batches[index] for index in sorted(batches)],
        evaluations=[evaluations[key] for key in sorted(evaluations)],
        sets=list(sets.values()),
        events=events,
        damage=() if follower.damage is None else (follower.damage,),
        learning=learning,
    )


def learning_watch(directory: Path) -> LearningWatch:
    """A watch over the learning of the run in ``directory``, which knows what counts in its reward if its settings do."""
    try:
        settings = read_run_settings(directory)
    except (ConfigurationError, AttributeError, TypeError):
        return LearningWatch()
    return LearningWatch(counted_components(settings.environment.options, settings.reward.group_weights))


def _rows(follower: MetricsFollower) -> list[Row]:
    try:
        return list(follower.rows())
    except OSError as error:
        raise NoMetrics(f"{follower.path}: cannot be read: {error.strerror}") from error

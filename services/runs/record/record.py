"""metrics.jsonl of any run: finished, going on, interrupted, or with lines that somebody has damaged.

``gspo_services.cli.run.metrics_reader`` refuses a damaged file, because a plot of it would look complete. Here every
reader is told how many lines could not be read, and goes on with the rest.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gspo_services.broker.metrics_file import METRICS_FILE
from gspo_services.runs.ledgers import other_ledgers
from gspo_services.shared.runtime.errors import ConfigurationError

Row = dict[str, Any]
LARGEST: Final = 1e100
"""No measure of a run is larger. Differences and squares of larger ones overflow."""


class NoRecord(ConfigurationError):
    """There is no metrics.jsonl, or it cannot be read; the text has the reason and the way out."""


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """One finished evaluation on held-out tasks."""

    policy_version: int
    batch: int
    """Batches that the evaluated weights were trained on."""
    reward: float
    """Mean over the tasks that finished: ``eval/reward``."""
    num_finished: int
    num_failed: int
    time_s: float
    """Seconds since the run began, without those in which it did not run; NaN if the line does not say."""
    score: float
    """What the best checkpoint is chosen by: ``evaluation.best_by``, or the reward."""
    metric: str = "eval/reward"
    """The name of the score."""


@dataclass(frozen=True, kw_only=True)
class SetScores:
    """The result of one named set."""

    name: str
    policy_version: int
    batch: int
    num_failed: int
    metrics: dict[str, tuple[float, float, float]]
    """Value, and the ends of its 95 % interval, by name; NaN for what is not known."""
    time_s: float


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The lines of one metrics.jsonl."""

    path: Path
    batches: list[Row]
    """One line for each trained batch, in their order; the last one where a batch was trained again."""
    evaluations: list[HeldOut]
    """By batches trained, then version. Evaluations in which no task finished are not among them."""
    sets: list[SetScores]
    """Of named sets, in the order of the file; the last one where a set was evaluated again after the same batches."""
    others: list[Row]
    """All other lines: dropped groups, batches set aside, and so on, in the order of the file; then of other brokers."""
    num_damaged: int
    """Lines that are not JSON objects, or lack what their event needs."""


def read_record(directory: Path) -> RunRecord:
    """Read the metrics.jsonl of the run in ``directory``. A last line that is still being written is not damaged.

    Raises: NoRecord.
    """
    path = directory / METRICS_FILE
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        what = "the broker writes it when it starts" if directory.is_dir() else "there is no such directory"
        raise NoRecord(f"{path}: not there: {what}") from error
    except OSError as error:
        raise NoRecord(f"{path}: cannot be read: {error.strerror}") from error
    lines = data.split(b"\n")
    lines.pop()  # Empty, or a line that is cut or still being written.
    batches: dict[int, Row] = {}
    evaluations: dict[tuple[int, int], HeldOut] = {}
    sets: dict[tuple[str, int], SetScores] = {}
    others: list[Row] = []
    num_damaged = 0
    for line in lines:
        row = object_of(line)
        if row is None:
            num_damaged += 1
        elif row["event"] == "batch":
            if (index := _count(row.get("batch"))) is None:
                num_damaged += 1
            else:
                batches[index] = row
        elif row["event"] == "eval":
            found = evaluation_of_line(row)
            if found is not None:
                evaluations[found.batch, found.policy_version] = found
            elif row.get("eval/reward", 0) is not None:
                num_damaged += 1
        elif (of_set := set_scores_of_line(row)) is not None:
            sets[of_set.name, of_set.batch] = of_set
        else:
            others.append(row)
    for each in other_ledgers(directory):
        others += _events_of(each / METRICS_FILE)
    return RunRecord(
        path=path,
        batches=[batches[index] for index in sorted(batches)],
        evaluations=[evaluations[key] for key in sorted(evaluations)],
        sets=list(sets.values()),
        others=others,
        num_damaged=num_damaged,
    )


def _events_of(path: Path) -> list[Row]:
    """What another broker of the run wrote down of its own: batches and evaluations are in the first one's file."""
    try:
        found = [object_of(line) for line in path.read_bytes().split(b"\n")[:-1]]
    except OSError:
        return []
    return [row for row in found if row is not None and row["event"] not in ("batch", "eval", "evaluation")]


def number(row: Row, key: str) -> float:
    """A measure of ``row``; NaN where it has none, or none that can be reckoned with."""
    value = row.get(key)
    usable = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST
    return float(value) if usable else math.nan  # type: ignore[arg-type]


def object_of(line: bytes) -> Row | None:
    """A line of metrics.jsonl; None when it is not the line of an event."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("event"), str) else None


def evaluation_of_line(row: Row) -> HeldOut | None:
    """The line of an evaluation; None when it lacks a number, as when no task finished."""
    batch, version, reward = _count(row.get("batch")), _count(row.get("policy_version")), number(row, "eval/reward")
    if batch is None or version is None or math.isnan(reward):
        return None
    return HeldOut(
        policy_version=version,
        batch=batch,
        reward=reward,
        num_finished=_count(row.get("num_finished")) or 0,
        num_failed=_count(row.get("num_failed")) or 0,
        time_s=number(row, "time_s"),
        score=reward if math.isnan(score := number(row, "eval/score")) else score,
        metric="eval/reward" if math.isnan(score) else f"eval/{row.get('set')}/{row.get('metric')}",
    )


def set_scores_of_line(row: Row) -> SetScores | None:
    """The line of a named set; None for another, or when it lacks a number."""
    batch, version, name = _count(row.get("batch")), _count(row.get("policy_version")), row.get("set")
    if row.get("event") != "evaluation" or batch is None or version is None or not isinstance(name, str):
        return None
    prefix = f"eval/{name}/"
    names = [key.removeprefix(prefix).removesuffix("_low") for key in row if key.startswith(prefix) and key.endswith("_low")]
    return SetScores(
        name=name,
        policy_version=version,
        batch=batch,
        num_failed=_count(row.get("num_failed")) or 0,
        metrics={
            metric: (
                number(row, prefix + metric),
                number(row, f"{prefix}{metric}_low"),
                number(row, f"{prefix}{metric}_high"),
            )
            for metric in names
        },
        time_s=number(row, "time_s"),
    )


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None

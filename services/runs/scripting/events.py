"""Lines of metrics.jsonl as typed events, in order, while they are written."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_services.broker.metrics_file import METRICS_FILE
from gspo_services.runs.ledgers import other_ledgers
from gspo_services.runs.record import HeldOut, evaluation_of_line, number, object_of
from gspo_services.shared.runtime.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class BatchMetrics:
    """One trained batch."""

    index: int
    policy_version: int
    """The version that it made; 0 for one that was trained again and made none."""
    reward: float
    """Mean reward of its trajectories. NaN, as all measures here, where the line has none."""
    lag: float
    """Mean lag of its trajectories, in policy versions."""
    num_tokens: float
    time_s: float
    """Seconds since the run began, without those in which it did not run."""
    measures: Mapping[str, float]
    """Every number of the line by its name, such as ``clip_fraction/all``."""


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """Any other line: a group dropped, a batch set aside or released, and so on."""

    event: str
    time_s: float
    values: Mapping[str, Any]
    """The whole line."""


Event = BatchMetrics | HeldOut | RunEvent


def typed(row: Mapping[str, Any]) -> Event | None:
    """A line as an event; None when it lacks what its event needs."""
    if row["event"] == "eval":
        return evaluation_of_line(dict(row))
    if row["event"] == "batch":
        return batch_metrics(row)
    return RunEvent(event=str(row["event"]), time_s=number(dict(row), "time_s"), values=row)


def batch_metrics(row: Mapping[str, Any]) -> BatchMetrics | None:
    """The line of a trained batch; None when it does not say which."""
    index, version = row.get("batch"), row.get("policy_version")
    if not isinstance(index, int) or not isinstance(version, int):
        return None
    known = {name: number(dict(row), name) for name in row if name not in ("event", "record")}
    measures = {name: value for name, value in known.items() if not math.isnan(value)}
    return BatchMetrics(
        index=index,
        policy_version=version,
        reward=measures.get("train/reward", math.nan),
        lag=measures.get("lag/mean", math.nan),
        num_tokens=measures.get("num_tokens", math.nan),
        time_s=measures.get("time_s", math.nan),
        measures=measures,
    )


class Tail:
    """New lines of a run's metrics.jsonl, and what else the other brokers of the run have to tell."""

    def __init__(self, directory: Path) -> None:
        self._first = _FileTail(directory)
        self._others = [_FileTail(each) for each in other_ledgers(directory)]

    def new(self) -> Iterator[Event]:
        """What was written since the last call. Damaged lines are passed over. Raises: ConfigurationError."""
        yield from self._first.new()
        for other in self._others:
            # Every broker writes down each batch; the first one speaks for all.
            yield from (event for event in other.new() if not isinstance(event, BatchMetrics))


class _FileTail:
    """New lines of a file that grows. Each line comes once, by its number, also if the file is written again."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / METRICS_FILE
        self._at = 0
        self._last = 0

    def new(self) -> Iterator[Event]:
        """What was written since the last call. Damaged lines are passed over. Raises: ConfigurationError."""
        try:
            with self._path.open("rb") as file:
                if self._path.stat().st_size < self._at:
                    self._at = 0  # It was damaged, and the broker has written it again.
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigurationError(f"{self._path}: cannot be read: {error.strerror}") from error
        *lines, rest = data.split(b"\n")
        self._at += len(data) - len(rest)
        for line in lines:
            row = object_of(line)
            record = 0 if row is None else row.get("record", 0)
            if row is None or (isinstance(record, int) and 0 < record <= self._last):
                continue
            self._last = record if isinstance(record, int) and record > 0 else self._last
            event = typed(row)
            if event is not None:
                yield event

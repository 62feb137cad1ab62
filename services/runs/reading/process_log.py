"""Reads process events from the logs beside a run's ledger: starts, ends, kills, restarts, lost leases."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

LOG_DIRECTORY: Final = "logs"
EVENTS: Final = {
    *("hello", "goodbye", "peer_forgotten", "rollout_state", "stopped_by_error", "cannot_start", "damaged", "resumed"),
    *("lease_expired", "lease_taken_back", "lease_of_former_session_ended", "attempt_failed", "attempt_not_counted"),
    *("group_dropped", "batch_quarantined", "batch_failed", "learner_ended_silently", "learner_resumed", "run_stops"),
    "commit_failed",
}
"""The events that are read; everything else in a log is routine."""
_MARKS: Final = tuple(f'"{event}"'.encode() for event in sorted(EVENTS))
MOST_LINE_BYTES: Final = 1 << 16


@dataclass(frozen=True, kw_only=True)
class ProcessEvent:
    """One line of a log about a process or a lease."""

    process: str
    """The process of the log: broker, learner, rollout-0."""
    event: str
    time: float
    """Seconds since 1970."""
    fields: Mapping[str, Any]


def process_events(directory: Path) -> Iterator[ProcessEvent]:
    """The events of all logs of ``directory``, log by log, oldest first in each.

    Lines that are cut, not UTF-8 or not JSON are left out, and so are logs that cannot be read. Nothing is kept in memory.
    """
    logs = directory / LOG_DIRECTORY
    for path in sorted(logs.glob("*.log*"), key=_order):
        try:
            with path.open("rb") as file:
                for line in file:
                    found = _event(path, line)
                    if found is not None:
                        yield found
        except OSError:
            continue


def _order(path: Path) -> tuple[str, int]:
    """Return a sorting key: rotated logs are NAME.log.1 and so on, and a larger number is older."""
    name, _, rest = path.name.partition(".log")
    number = rest.lstrip(".")
    return name, -int(number) if number.isdigit() else 0


def _event(path: Path, line: bytes) -> ProcessEvent | None:
    if len(line) > MOST_LINE_BYTES or not any(mark in line for mark in _MARKS):
        return None
    try:
        plain = json.loads(line)
        event, stamp = plain.pop("event"), plain.pop("timestamp")
        time = datetime.fromisoformat(stamp).replace(tzinfo=UTC).timestamp()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None
    if event not in EVENTS:
        return None
    return ProcessEvent(process=path.name.partition(".log")[0], event=event, time=time, fields=plain)

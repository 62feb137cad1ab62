"""Reads metrics.jsonl, which the broker writes (``gspo_services.broker.metrics_file``), for the table and the plot."""

import json
from pathlib import Path
from typing import Any, Final

from gspo_services.runs.ledgers import other_ledgers

Row = dict[str, Any]

LARGEST: Final = 1e100
"""No measure of a run is larger. The difference of two floats near the largest one overflows, and a plot takes many."""


def read_rows(path: Path, event: str | None = None) -> list[Row]:
    """Rows of one kind of event, or of all, in order, without a last line that a crash has cut.

    Raises: ValueError naming the file and line for any other line that is not a JSON object.
    """
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                continue
            raise ValueError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number}: expected a JSON object")
        if event is None or row.get("event") == event:
            rows.append(row)
    return rows


def event_rows(directory: Path, *events: str) -> list[Row]:
    """Rows of these events from the metrics.jsonl of every broker of the run, those of one after those of another.

    Raises: ValueError.
    """
    found: list[Row] = []
    for each in (directory, *other_ledgers(directory)):
        found += [row for row in read_rows(each / "metrics.jsonl") if row.get("event") in events]
    return found


def batch_rows(path: Path) -> list[Row]:
    """One row per batch, in order: the last one where a batch was trained again after a crash. Raises: ValueError."""
    rows = {_number(row.get("batch")): row for row in read_rows(path, "batch")}
    return [rows[batch] for batch in sorted(rows)]


def _number(batch: object) -> int:
    return batch if isinstance(batch, int) else -1


def column(rows: list[Row], key: str) -> list[float]:
    """Values of ``key``; NaN where a row lacks it or has more than LARGEST, so that plots show a gap."""
    return [float(row[key]) if _is_drawable(row.get(key)) else float("nan") for row in rows]


def _is_drawable(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= LARGEST

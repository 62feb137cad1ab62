"""Lines of metrics.jsonl as rows, and their measures as numbers."""

import json
import math
from collections.abc import Sequence
from typing import Any, Final

Row = dict[str, Any]
"""A line: "event", "line" (its number), "time" (seconds since 1970), "time_s" (since the run began), and its measures."""

LARGEST: Final = 1e100
"""No measure of a run is larger. Differences and squares of larger ones overflow, and a plot takes many."""
_INTEGERS: Final = range(2**63)


def parsed(line: bytes) -> Row:
    """Parse a whole line. Raises: ValueError with what it lacks."""
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError("not UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise ValueError("not JSON") from error
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    if not count(row, "line"):
        raise ValueError('no number ("line")')
    lacking = _lacking(row)
    if lacking:
        raise ValueError(f'no "{lacking}" that can be used')
    return row


def _lacking(row: Row) -> str:
    """Return the first key that the event of ``row`` needs and lacks; empty when it has all."""
    match row.get("event"):
        case "batch":
            counts = ["batch"]
        case "eval" | "evaluation":
            counts = ["batch", "policy_version"]
        case event:
            return "" if isinstance(event, str) else "event"
    for key in counts:
        if count(row, key) is None:
            return key
    if row["event"] == "evaluation" and not isinstance(row.get("set"), str):
        return "set"
    # Null: no task was finished.
    if row["event"] == "eval" and row.get("eval/reward", "") is not None and math.isnan(number(row, "eval/reward")):
        return "eval/reward"
    return ""


def count(row: Row, key: str) -> int | None:
    """Return a non-negative whole number; None if the row has none."""
    value = row.get(key)
    return value if type(value) is int and value in _INTEGERS else None


def number(row: Row, key: str) -> float:
    """Return a measure of ``row``; NaN if it has none, or none that is usable."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        return math.nan
    return float(value)


def column(rows: Sequence[Row], key: str) -> list[float]:
    """Return a measure of each row; NaN makes a gap in a plot."""
    return [number(row, key) for row in rows]


def known(values: Sequence[float]) -> list[float]:
    """Return the values that are not NaN."""
    return [value for value in values if not math.isnan(value)]


def or_none(value: float) -> float | None:
    """Return a measure for JSON, which has no NaN."""
    return None if math.isnan(value) else value

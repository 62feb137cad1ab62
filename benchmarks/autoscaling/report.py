"""Run all cases and write tables and JSON."""

import json
import math
import platform
import resource
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.autoscaling import scenarios
from benchmarks.autoscaling.measures import Outcome, Row
from benchmarks.autoscaling.scenarios import Case
from benchmarks.markdown import table as markdown

COLUMNS = {
    "settle_min": ("settled after, min", "{:.0f}"),
    "waiting": ("learner waits, %", "{:.1f}"),
    "lag_used": ("mean lag / max_lag", "{:.2f}"),
    "pods": ("pods", "{:.1f}"),
    "overshoot": ("overshoot", "{:.2f}"),
    "spread": ("spread", "{:.2f}"),
    "turns_per_hour": ("turns per hour", "{:.1f}"),
    "batches_per_hour": ("batches per hour", "{:.0f}"),
    "pod_hours_per_batch": ("pod hours per batch", "{:.2f}"),
}
TABLES: dict[str, Callable[[], list[Case]]] = {
    "As deployed, in all jobs and weathers": scenarios.jobs,
    "Signals, base job": lambda: scenarios.compared(scenarios.BASE),
    "Signals, 2 % of episodes 10x as long": lambda: scenarios.compared(scenarios.JOBS["2 % of episodes 10x as long"]),
    "One change at a time, base job": scenarios.sensitivity,
}


def rows_of(pool: Executor, cases: Sequence[Case], seeds: Sequence[int]) -> list[Row]:
    """Run every case with every seed."""
    measured = list(pool.map(_measure, [(case, seed) for case in cases for seed in seeds]))
    return [
        Row(
            name=case.name,
            fluid_size=case.config.fluid_size(),
            outcomes=tuple(measured[index * len(seeds) : (index + 1) * len(seeds)]),
        )
        for index, case in enumerate(cases)
    ]


def _measure(job: tuple[Case, int]) -> Outcome:
    case, seed = job
    return case.outcome(seed)


def table(rows: Sequence[Row]) -> str:
    """Return Markdown: medians, and quartiles in brackets where they differ."""
    heads = ["", "fluid size", *(head for head, _ in COLUMNS.values())]
    lines = []
    for entry in rows:
        cells = [entry.name, f"{entry.fluid_size:.1f}"]
        for field, (_, form) in COLUMNS.items():
            scale = 100 if field == "waiting" else 1
            low, median, high = (_said(form, scale * value) for value in entry.quartiles(field))
            cells.append(median if low == high else f"{median} ({low}..{high})")
        lines.append(cells)
    return markdown(heads, lines) + "\n"


def _said(form: str, value: float) -> str:
    return form.format(value) if math.isfinite(value) else "never" if math.isinf(value) else "-"


def run_all(directory: Path, *, seeds: Sequence[int], jobs: int) -> None:
    """Write everything to ``directory``: tables.md and results.json; print progress."""
    directory.mkdir(parents=True, exist_ok=True)
    result: dict[str, list[Row]] = {}
    with ProcessPoolExecutor(jobs) as pool:
        for title, cases in TABLES.items():
            result[title] = rows_of(pool, cases(), seeds)
            print(f"{title}: done", flush=True)
            _write(directory, result, len(seeds))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{used.ru_utime + used.ru_stime:.0f} s of CPU; {directory}")


def _write(directory: Path, result: Mapping[str, Sequence[Row]], num_seeds: int) -> None:
    head = f"{datetime.now(tz=UTC):%Y-%m-%d}, Python {platform.python_version()}, {num_seeds} seeds.\n\n"
    texts = [f"### {title}\n\n{table(rows)}" for title, rows in result.items()]
    (directory / "tables.md").write_text(head + "\n".join(texts), encoding="utf-8")
    plain = {title: [_plain(entry) for entry in rows] for title, rows in result.items()}
    (directory / "results.json").write_text(json.dumps(plain, indent=1), encoding="utf-8")


def _plain(entry: Row) -> dict[str, Any]:
    """Return plain values; infinity and NaN, which JSON lacks, become null."""
    values = {field.name: [getattr(outcome, field.name) for outcome in entry.outcomes] for field in fields(Outcome)}
    finite = {name: [value if math.isfinite(value) else None for value in listed] for name, listed in values.items()}
    return {"name": entry.name, "fluid_size": entry.fluid_size, **finite}

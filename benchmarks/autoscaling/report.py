"""Runs all cases and writes tables, JSON and plots."""

import json
import math
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.autoscaling import plots, scenarios
from benchmarks.autoscaling.control import Run
from benchmarks.autoscaling.measures import Outcome
from benchmarks.autoscaling.scenarios import Case

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
MAP_LAGS = (2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case over all seeds."""

    name: str
    fluid_size: float
    outcomes: tuple[Outcome, ...]

    def quartiles(self, field: str) -> tuple[float, float, float]:
        """Of three seeds or more the quartiles, with both ends counted."""
        values = sorted(getattr(outcome, field) for outcome in self.outcomes)
        return _at(values, 0.25), _at(values, 0.5), _at(values, 0.75)


def _at(values: Sequence[float], share: float) -> float:
    place = share * (len(values) - 1)
    low, high = values[math.floor(place)], values[math.ceil(place)]
    return high if math.isinf(high) and place % 1 else low + (high - low) * (place % 1) if high != low else low


def row(case: Case, seeds: Sequence[int]) -> Row:
    return Row(
        name=case.name,
        fluid_size=case.config.fluid_size(),
        outcomes=tuple(case.outcome(seed) for seed in seeds),
    )


def table(rows: Sequence[Row]) -> str:
    """Markdown: medians, and quartiles in brackets where they differ."""
    heads = ["", "fluid size", *(head for head, _ in COLUMNS.values())]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for entry in rows:
        cells = [entry.name, f"{entry.fluid_size:.1f}"]
        for field, (_, form) in COLUMNS.items():
            scale = 100 if field == "waiting" else 1
            low, median, high = (_said(form, scale * value) for value in entry.quartiles(field))
            cells.append(median if low == high else f"{median} ({low}..{high})")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _said(form: str, value: float) -> str:
    return form.format(value) if math.isfinite(value) else "never" if math.isinf(value) else "-"


def run_all(directory: Path, *, seeds: Sequence[int], large: bool) -> None:
    """Everything into ``directory``: tables.md, results.json, autoscaling_*.png. Says on stdout what is done and how long it took."""
    directory.mkdir(parents=True, exist_ok=True)
    begin = time.process_time()
    result: dict[str, list[Row]] = {}
    for title, cases in {
        "As deployed, in all jobs and weathers": scenarios.jobs(),
        "Signals, base job": scenarios.compared(scenarios.BASE),
        "Signals, 2 % of episodes 10x as long": scenarios.compared(scenarios.JOBS["2 % of episodes 10x as long"]),
        "One change at a time, base job": scenarios.sensitivity(),
    }.items():
        result[title] = [row(case, seeds) for case in cases]
        print(f"{title}: {len(cases)} cases, {time.process_time() - begin:.0f} s of CPU so far", flush=True)
    sizes = {lag: [row(case, seeds[:2]) for case in scenarios.map_cases(lag)] for lag in MAP_LAGS}
    plots.draw_map(sizes, directory / "autoscaling_map.png")
    plots.draw_signals(_runs(scenarios.compared(scenarios.BASE)[:4]), directory / "autoscaling_signals.png")
    chosen = {case.name: case for case in scenarios.jobs()}
    weathers = ["base", "spot: half at once", "spot: 5 % lost per hour", "2 % of episodes 10x as long"]
    plots.draw_weathers(_runs([chosen[name] for name in weathers]), directory / "autoscaling_weathers.png")
    texts = [f"### {title}\n\n{table(rows)}" for title, rows in result.items()]
    if large:
        before = time.process_time()
        result["Thousands of rollouts"] = [row(scenarios.large(), [0])]
        cpu_s = time.process_time() - before
        texts.append(f"### Thousands of rollouts ({cpu_s:.0f} s of CPU)\n\n{table(result['Thousands of rollouts'])}")
    head = f"{datetime.now(tz=UTC):%Y-%m-%d}, Python {platform.python_version()}, {len(seeds)} seeds"
    used = f"{time.process_time() - begin:.0f} s of CPU"
    (directory / "tables.md").write_text(f"{head}, {used}.\n\n" + "\n".join(texts), encoding="utf-8")
    everything: dict[str, Any] = {title: [_plain(entry) for entry in rows] for title, rows in result.items()}
    everything |= {f"fixed fleets, max_lag {lag}": [_plain(entry) for entry in rows] for lag, rows in sizes.items()}
    (directory / "results.json").write_text(json.dumps(everything, indent=1), encoding="utf-8")
    print(f"{used}; {directory}")


def _runs(cases: Sequence[Case]) -> dict[str, Run]:
    return {case.name: case.run(0) for case in cases}


def _plain(entry: Row) -> dict[str, Any]:
    """JSON knows no infinity and no NaN: null."""
    values = {field.name: [getattr(outcome, field.name) for outcome in entry.outcomes] for field in fields(Outcome)}
    finite = {name: [value if math.isfinite(value) else None for value in listed] for name, listed in values.items()}
    return {"name": entry.name, "fluid_size": entry.fluid_size, **finite}

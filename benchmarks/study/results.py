"""The condensed results that are kept with the code, so that tables and plots need no runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.study.config import RunConfig
from benchmarks.study.questions.grid import Cell, cells, questions, runs
from benchmarks.study.reporting.summary import Interval, RunSummary, interval, summarise_run
from benchmarks.study.run_record import (
    RESULTS,
    RUNS_FILE,
    STARTS_FILE,
    known_starts,
    made_starts,
    read_record,
    record_path,
)

PROBES_FILE = "volatility.jsonl"


def condense_records(directory: Path) -> int:
    """Write the summaries of every finished run of the grid, probes, and digests of start models; return the number of runs.

    What is not in ``directory`` stays as it is.
    """
    known = load_summaries()
    found = {config.run_id: record_path(directory, config) for config in runs(questions())}
    summaries = [
        summarise_run(read_record(path)) if path.is_file() else known[run_id]
        for run_id, path in found.items()
        if path.is_file() or run_id in known
    ]
    probes = [path.read_text() for path in sorted((directory / "probes").glob("*.jsonl"))]
    lines = [json.dumps(summary.as_dict(), separators=(",", ":")) + "\n" for summary in summaries]
    (RESULTS / RUNS_FILE).write_text("".join(lines))
    if probes:
        (RESULTS / PROBES_FILE).write_text("".join(probes))
    starts = made_starts(directory) | known_starts()
    (RESULTS / STARTS_FILE).write_text(json.dumps(starts, indent=0, sort_keys=True) + "\n")
    return len(summaries)


def all_summaries(directory: Path, wanted: Iterable[RunConfig]) -> dict[str, RunSummary]:
    """Return the summaries of the wanted runs that are finished: the kept ones, and those of records in ``directory``."""
    known = load_summaries()
    found = {}
    for config in wanted:
        path = record_path(directory, config)
        if path.is_file():
            found[config.run_id] = summarise_run(read_record(path))
        elif config.run_id in known:
            found[config.run_id] = known[config.run_id]
    return found


def load_summaries(directory: Path = RESULTS) -> dict[str, RunSummary]:
    """Load the summaries by run id."""
    lines = (directory / RUNS_FILE).read_text().splitlines()
    return {summary.run_id: summary for summary in (RunSummary.from_dict(json.loads(line)) for line in lines)}


def load_probes(directory: Path = RESULTS) -> list[dict[str, Any]]:
    """Load the records of question b."""
    return [json.loads(line) for line in (directory / PROBES_FILE).read_text().splitlines()]


class Results:
    """Finished runs by question, row and column."""

    def __init__(self, summaries: Mapping[str, RunSummary], grid: Iterable[Cell] | None = None) -> None:
        self._by_place: dict[tuple[str, str, str], dict[int, RunSummary]] = {}
        for cell in cells() if grid is None else grid:
            if cell.config.run_id in summaries:
                place = self._by_place.setdefault((cell.question, cell.row, cell.column), {})
                place[cell.config.seed] = summaries[cell.config.run_id]

    def rows(self, question: str) -> list[str]:
        return list(dict.fromkeys(row for name, row, _ in self._by_place if name == question))

    def columns(self, question: str) -> list[str]:
        return list(dict.fromkeys(column for name, _, column in self._by_place if name == question))

    def at(self, question: str, row: str, column: str) -> dict[int, RunSummary]:
        """Return finished runs by seed."""
        return self._by_place.get((question, row, column), {})

    def mean(self, question: str, row: str, column: str, measure: Callable[[RunSummary], float]) -> Interval:
        """Return the mean over seeds."""
        return interval([measure(summary) for summary in self.at(question, row, column).values()])

    def paired(
        self, question: str, row: str, baseline: str, columns: Iterable[str], measure: Callable[[RunSummary], float]
    ) -> Interval:
        """Return the mean over seeds of ``measure`` at ``row`` minus that at ``baseline``.

        Differences are averaged over the columns that both have finished. A seed counts as one value, however many columns:
        its runs share a start model and are not independent.
        """
        by_seed: dict[int, list[float]] = {}
        for column in columns:
            own, other = self.at(question, row, column), self.at(question, baseline, column)
            for seed in own.keys() & other.keys():
                by_seed.setdefault(seed, []).append(measure(own[seed]) - measure(other[seed]))
        return interval([sum(differences) / len(differences) for _, differences in sorted(by_seed.items())])

"""The record of a run on disk: one file of JSON lines, complete or absent."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.study.config import RunConfig

RESULTS = Path(__file__).parent / "results"
RUNS_FILE = "runs.jsonl"


@dataclass(frozen=True)
class RunRecord:
    """A finished run as it was written: a line for each batch, and one for the evaluation after the last."""

    run_id: str
    config: dict[str, Any]
    batches: list[dict[str, float]]


def record_path(directory: Path, config: RunConfig) -> Path:
    """Return the path of a finished run's record."""
    return directory / "records" / f"{config.run_id}.jsonl"


def read_record(path: Path) -> RunRecord:
    """Read a record. Raises: ValueError for a file that is no record."""
    head, *lines = (json.loads(line) for line in path.read_text().splitlines())
    if "config" not in head:
        raise ValueError(f"{path} does not start with a configuration: remove it and run again")
    return RunRecord(head["run"], head["config"], lines)


def condensed_runs() -> set[str]:
    """Return the ids of the runs whose condensed results are kept with the code."""
    return {json.loads(line)["run_id"] for line in (RESULTS / RUNS_FILE).read_text().splitlines()}

"""One whole run with its halves on their cores: everything that ``gspo run`` starts, and a record of all activities."""

import asyncio
import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from benchmarks.pipeline.processes import ProcessWatch
from benchmarks.pipeline.workload import Cores, RunFiles
from gspo_services.cli.run.command import run_processes
from gspo_services.cli.run.processes import process_specs
from gspo_services.cli.run.supervisor import ProcessSpec
from gspo_services.runs.metrics import read_metrics
from gspo_services.shared.settings import forwarded_arguments

PINNED: Final = "benchmarks.pipeline.pinned"


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The output of a run: the lines of its record, its logs, and the CPU time by role."""

    directory: Path
    rows: list[dict[str, Any]]
    """One per batch, of metrics.jsonl."""
    watch: ProcessWatch

    def events(self, process: str, event: str) -> list[dict[str, Any]]:
        """Lines of one process's log."""
        return log_events(self.directory / "logs" / f"{process}.log", event)


async def run_pinned(files: RunFiles, cores: Cores, stop: asyncio.Event, limit_s: float) -> RunRecord:
    """Run to the end. The broker and this process may use any core.

    Raises: the errors of ``gspo run``, in a group; TimeoutError after ``limit_s``.
    """
    directory = files.settings.run.directory
    directory.mkdir(parents=True, exist_ok=True)
    specs = pinned_specs(process_specs(files.settings, forwarded_arguments(files.config, files.overrides)), cores)
    watch = ProcessWatch()
    places = {"learner": cores.learner, "agent": cores.rollout, "scheduler": cores.rollout, "server": cores.rollout}
    with (directory / "run.log").open("w", encoding="utf-8") as output:
        async with asyncio.timeout(limit_s), asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(watch.run(places), name="watch")
            # The processes start without the working directory on their path, and PINNED is a module of this checkout.
            os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
            await run_processes(files.settings, specs, Console(file=output, width=160), stop, look="plain")
            watching.cancel()
    return RunRecord(directory=directory, rows=read_metrics(directory).batches, watch=watch)


def pinned_specs(specs: list[ProcessSpec], cores: Cores) -> list[ProcessSpec]:
    """Return the same processes; rollouts and learner begin on their cores, which their children inherit."""
    places = {"gspo_services.learner": cores.learner, "gspo_services.rollout": cores.rollout}
    return [pinned(spec, places[spec.module]) if spec.module in places else spec for spec in specs]


def pinned(spec: ProcessSpec, cores: frozenset[int]) -> ProcessSpec:
    """Return the same process on these cores alone."""
    return dataclasses.replace(spec, module=PINNED, arguments=(cores_word(cores), spec.module, *spec.arguments))


def cores_word(cores: frozenset[int]) -> str:
    return ",".join(str(core) for core in sorted(cores))


def log_events(path: Path, event: str) -> list[dict[str, Any]]:
    """Return the events of one kind in a log; other lines are left out."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("{") and line.endswith("}"):
            row = json.loads(line)
            if row.get("event") == event:
                found.append(row)
    return found

"""Make the study's runs, or its tables and plots: ``python -m benchmarks.study``.

Runs on disk are skipped, and so are those whose condensed results are kept with the code. The command can be stopped and
repeated at any time. The most important runs come first: finished ones can be evaluated at any time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from benchmarks.study.config import ModelName, RunConfig, TaskName
from benchmarks.study.jobs import make_probes, make_run, make_start
from benchmarks.study.questions.grid import cells, questions, runs
from benchmarks.study.run_record import condensed_runs, record_path

# CPU seconds on one core of 2 (AMD EPYC, virtual), for the estimate before the first measurement; and the sequences in
# the batch that they were measured with.
SECONDS_PER_BATCH: dict[tuple[TaskName, ModelName], tuple[float, int]] = {
    ("arithmetic", "tiny"): (0.43, 256),
    ("countdown", "tiny"): (0.78, 128),
    ("long-countdown", "deep"): (3.2, 64),
}
START_SECONDS: dict[ModelName, float] = {"tiny": 55.0, "deep": 275.0}


def main(arguments: list[str] | None = None) -> int:
    """Parse, then list, estimate, run or evaluate."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.study", description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path("runs/study"), help="where models and records are kept")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, one thread each")
    parser.add_argument("--only", metavar="A,B", help=f"questions: {', '.join(questions())}, b")
    parser.add_argument("--again", action="store_true", help="also make runs whose condensed results are kept with the code")
    parser.add_argument("--list", action="store_true", help="list the runs and whether they are finished")
    parser.add_argument(
        "--dry-run", action="store_true", help="estimate how many runs are missing and how long they would take"
    )
    parser.add_argument(
        "--plots", action="store_true", help="write tables and plots from the condensed results, without runs"
    )
    parser.add_argument("--condense", action="store_true", help="condense the records into benchmarks/study/results")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: at least one")
    if options.condense or options.plots:
        return _evaluate(options.directory, condense=options.condense)
    chosen = None if options.only is None else options.only.split(",")
    probes = chosen is None or "b" in chosen
    try:
        wanted = runs(None if chosen is None else [name for name in chosen if name != "b"])
    except ValueError as error:
        parser.error(str(error))
    condensed = set() if options.again else condensed_runs()
    if options.list:
        _list(options.directory, wanted, condensed)
        return 0
    missing = [config for config in wanted if not _is_finished(options.directory, config, condensed)]
    seconds = sum(map(estimate, missing)) / options.jobs
    print(f"{len(wanted)} runs, {len(wanted) - len(missing)} finished, {len(missing)} to make: about {seconds / 60:.0f} min")
    if options.dry_run:
        return 0
    return _run(options.directory, missing, options.jobs, probes=probes)


def estimate(config: RunConfig) -> float:
    """Estimate the CPU seconds of a run: a batch costs in proportion to its sequences."""
    seconds, usual = SECONDS_PER_BATCH[config.task, config.model]
    factor = 1.2 if config.anchor == "proximal" or config.routing_replay else 1.0
    return seconds * config.num_batches * factor * config.num_sequences / usual


def _is_finished(directory: Path, config: RunConfig, condensed: set[str]) -> bool:
    return config.run_id in condensed or record_path(directory, config).is_file()


def _list(directory: Path, wanted: list[RunConfig], condensed: set[str]) -> None:
    names: dict[str, list[str]] = {}
    for cell in cells():
        names.setdefault(cell.config.run_id, []).append(f"{cell.question}: {cell.row}, {cell.column}")
    for config in wanted:
        state = "finished" if _is_finished(directory, config, condensed) else "missing "
        print(f"{config.run_id}  {state}  seed {config.seed}  {'; '.join(names[config.run_id])}")


def _run(directory: Path, missing: list[RunConfig], jobs: int, *, probes: bool) -> int:
    """Make start models first, so that no two workers make the same one; then the runs in order."""
    # For the workers' import of torch too: its thread pool is sized once.
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=jobs, mp_context=context) as pool:
        starts = list(
            {(config.task, config.model, config.seed % config.start_models): config for config in missing}.values()
        )
        longest = max((START_SECONDS[config.model] for config in starts), default=0.0)
        print(f"{len(starts)} start models (made once, up to {longest:.0f} s each)", flush=True)
        for made in as_completed([pool.submit(make_start, directory, start) for start in starts]):
            made.result()
        if probes:
            pool.submit(make_probes, directory).result()
        began, total, done = time.monotonic(), sum(map(estimate, missing)), 0.0
        futures = {pool.submit(make_run, directory, config): config for config in missing}
        for index, future in enumerate(as_completed(futures), start=1):
            cpu_seconds = future.result()
            done += estimate(futures[future])
            left = (time.monotonic() - began) * (total - done) / done
            name = futures[future].run_id
            print(f"[{index}/{len(missing)}] {name}  {cpu_seconds:.0f} CPU s; {left / 60:.0f} min to go", flush=True)
    return 0


def _evaluate(directory: Path, *, condense: bool) -> int:
    from benchmarks.study.reporting.report import write_report
    from benchmarks.study.results import condense_records

    if condense:
        condense_records(directory)
    write_report()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Make the study's runs, or its tables and plots: ``python -m benchmarks.study``.

Runs on disk are skipped, and so are those whose condensed results are kept with the code. The command can be stopped and
repeated at any time. The most important runs come first: finished ones can be evaluated at any time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from benchmarks.study.config import ModelName, RunConfig, TaskName
from benchmarks.study.jobs import ARITHMETIC, make_probes, make_run, make_start
from benchmarks.study.questions.grid import ON_REQUEST, cells, questions, runs
from benchmarks.study.run_record import condensed_runs, kept_digests, note_starts, read_record, record_path

# CPU seconds on one core of 2 (AMD EPYC, virtual), for the estimate before the first measurement; and the sequences in
# the batch that they were measured with.
SECONDS_PER_BATCH: dict[tuple[TaskName, ModelName], tuple[float, int]] = {
    ("arithmetic", "tiny"): (0.43, 256),
    ("countdown", "tiny"): (0.78, 128),
    ("mixed-countdown", "tiny"): (1.0, 128),
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
    parser.add_argument(
        "--run", metavar="ID", help="repeat one run (see --list), and compare its weights with the kept ones"
    )
    parser.add_argument("--starts", action="store_true", help="make the start models only")
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
    if options.run:
        return _repeat(options.directory, options.run)
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
    missing = [config for config in wanted if not is_finished(options.directory, config, condensed)]
    seconds = sum(map(estimate, missing)) / options.jobs
    print(f"{len(wanted)} runs, {len(wanted) - len(missing)} finished, {len(missing)} to make: about {seconds / 60:.0f} min")
    if options.dry_run:
        if chosen is None:
            _tell_of_requests(options.directory)
        return 0
    return make(options.directory, missing, options.jobs, probes=probes, starts_only=options.starts)


def estimate(config: RunConfig) -> float:
    """Estimate the CPU seconds of a run: a batch costs in proportion to its sequences."""
    seconds, usual = SECONDS_PER_BATCH[config.task, config.model]
    factor = 1.2 if config.anchor == "proximal" or config.routing_replay else 1.0
    return seconds * config.num_batches * factor * config.num_sequences / usual


def is_finished(directory: Path, config: RunConfig, condensed: set[str]) -> bool:
    return config.run_id in condensed or record_path(directory, config).is_file()


def _tell_of_requests(directory: Path) -> None:
    """Say what is missing of the questions that are made on request only."""
    condensed = condensed_runs()
    for question in ON_REQUEST:
        wanted = runs([question])
        missing = [config for config in wanted if not is_finished(directory, config, condensed)]
        if not wanted:
            print(f"{question}: waits for the settings that i-tune chooses (benchmarks/study/questions/default.py)")
        elif missing:
            hours = sum(map(estimate, missing)) / 3600
            print(f"{question}: {len(missing)} of {len(wanted)} missing, {hours:.1f} CPU h: --only {question}")


def _list(directory: Path, wanted: list[RunConfig], condensed: set[str]) -> None:
    names: dict[str, list[str]] = {}
    for cell in cells():
        names.setdefault(cell.config.run_id, []).append(f"{cell.question}: {cell.row}, {cell.column}")
    for config in wanted:
        state = "finished" if is_finished(directory, config, condensed) else "missing "
        print(f"{config.run_id}  {state}  seed {config.seed}  {'; '.join(names[config.run_id])}")


def _repeat(directory: Path, run_id: str) -> int:
    """Make one run again; 0 if its weights at the start and the end are the kept ones, to the last bit."""
    config = next((cell.config for cell in cells() if cell.config.run_id == run_id), None)
    if config is None:
        print(f"there is no run {run_id}: --list has them", file=sys.stderr)
        return 2
    repeats = directory / "repeats"
    record_path(repeats, config).unlink(missing_ok=True)
    with _workers(1) as pool:
        digest = pool.submit(make_start, repeats, config).result()
        _tell_of_starts(note_starts(repeats, {config.start_name: digest}))
        pool.submit(make_run, repeats, config).result()
    again, kept = read_record(record_path(repeats, config)).digests, kept_digests(run_id)
    for when in ("start", "end"):
        said = "none is kept" if when not in kept else "as kept" if kept[when] == again[when] else f"kept: {kept[when]}"
        print(f"weights at the {when}: {again[when]} ({said})")
    same = all(again[when] == kept.get(when) for when in ("start", "end"))
    if kept and not same:
        where = kept.get("on", "AMD EPYC")
        print(f"made on {again['on']}; the kept ones on {where}: only the same kind has the same last bits")
    return 0 if same else 1


def _workers(jobs: int) -> ProcessPoolExecutor:
    # For the workers' import of torch: kernels and its thread pool are chosen once.
    os.environ.update(ARITHMETIC)
    # A pool's worker takes an interrupt for the end of its job, and goes on with the next one.
    return ProcessPoolExecutor(
        max_workers=jobs,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_DFL),
    )


def _tell_of_starts(others: list[str]) -> None:
    for name in others:
        print(f"start model {name} is not the one that is kept (starts.json): runs from it have other figures", flush=True)


def make(directory: Path, missing: list[RunConfig], jobs: int, *, probes: bool = False, starts_only: bool = False) -> int:
    """Make start models first, so that no two workers make the same one; then the runs in order."""
    with _workers(jobs) as pool:
        starts = list({config.start_name: config for config in missing}.values())
        longest = max((START_SECONDS[config.model] for config in starts), default=0.0)
        print(f"{len(starts)} start models (made once, up to {longest:.0f} s each)", flush=True)
        making = {pool.submit(make_start, directory, start): start.start_name for start in starts}
        for made in as_completed(making):
            _tell_of_starts(note_starts(directory, {making[made]: made.result()}))
        if starts_only:
            return 0
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

"""Question m, its parts in their order: ``python -m benchmarks.study.lag_margin``.

It tunes each arm, writes the settings that it chose into results/lag_tuned.json, and makes the compared runs. What is
finished is never made again, so the command can be stopped and repeated at any time. ``--lengths`` and ``--seeds`` make a
part of it, on this machine or another; records are files that can be copied together into one directory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.study.__main__ import estimate, is_finished, make
from benchmarks.study.config import RunConfig
from benchmarks.study.questions.grid import Cell
from benchmarks.study.questions.lag import ARMS, LENGTHS, SEEDS, TUNED_FILE, Tuning, comparison, place_of, tuning_runs
from benchmarks.study.reporting.lag import next_tuning
from benchmarks.study.results import Results, all_summaries, condense_records
from benchmarks.study.run_record import condensed_runs


def main(arguments: Sequence[str] | None = None, *, tuned_file: Path = TUNED_FILE) -> int:
    """Parse, then estimate or make the parts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.study.lag_margin", description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path("runs/study"), help="where models and records are kept")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, one thread each")
    parser.add_argument("--lengths", nargs="+", choices=list(LENGTHS), default=list(LENGTHS), help="answers, in this order")
    parser.add_argument("--seeds", nargs="+", type=int, choices=SEEDS, default=list(SEEDS), help="of the compared runs")
    parser.add_argument("--dry-run", action="store_true", help="say what is missing, and how long it takes")
    options = parser.parse_args(arguments)
    for length in options.lengths:
        if not options.dry_run:
            _tune(options.directory, options.jobs, length, tuned_file)
        known = Tuning.read(tuned_file)
        wanted = [config for row, _, config in comparison(known) if row.startswith(f"{length}/")]
        wanted = [config for config in wanted if config.seed in options.seeds]
        if options.dry_run:
            tuning = [config for row, _, config in tuning_runs(known) if row.startswith(f"{length}/")]
            _tell(f"{length}, m-tune", _missing(options.directory, tuning))
            _tell(f"{length}, m", _missing(options.directory, wanted))
            continue
        make(options.directory, _missing(options.directory, wanted), options.jobs)
    if not options.dry_run:
        condense_records(options.directory)
        print("now: python -m benchmarks.study --plots")
    return 0


def _tune(directory: Path, jobs: int, length: str, tuned_file: Path) -> None:
    """Make the runs of m-tune of a length until each arm has its setting."""
    known = Tuning.read(tuned_file)
    while any(place_of(length, arm) not in known.chosen for arm in ARMS):
        cells = [Cell("m-tune", *each) for each in tuning_runs(known) if each[0].startswith(f"{length}/")]
        make(directory, _missing(directory, [cell.config for cell in cells]), jobs)
        results = Results(all_summaries(directory, [cell.config for cell in cells]), cells)
        known = next_tuning(results, known, [length])
        known.write(tuned_file)


def _missing(directory: Path, wanted: Sequence[RunConfig]) -> list[RunConfig]:
    condensed = condensed_runs()
    unique = {config.run_id: config for config in wanted}
    return [config for config in unique.values() if not is_finished(directory, config, condensed)]


def _tell(part: str, missing: Sequence[RunConfig]) -> None:
    print(f"{part}: {len(missing)} runs missing, {sum(map(estimate, missing)) / 3600:.1f} CPU h")


if __name__ == "__main__":
    sys.exit(main())

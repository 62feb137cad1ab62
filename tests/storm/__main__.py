"""An hour of everything at once against two whole runs: do they learn, lose nothing, leak nothing, and keep their pace?

make test-storm            # or: python -m tests.storm --minutes 60 --quiet 5 --seed 0

One half of the time belongs to a run of an environment whose answers are judged by a reward worker, in the sandbox and by a
reward model, the other to a run of agents (--part names one alone). Each works undisturbed for --quiet
minutes, which gives its pace. Then the storm: processes of every kind are killed and suspended, the disk of the run
fills, the broker is cut off, bits of checkpoints flip, a peer with keys of its own attacks the sockets, and some agents
attack the endpoint and their worker. At the end the run is stopped as a user stops it. These must hold: the held-out reward
rose, the audit of the ledger is clean, nothing was dropped as stale, only attackers lost groups, the pace was at least 0.7
of the quiet one, memory and files did not grow, everything of the weather happened, nothing is left behind. The exit status
is 1 when one does not. It needs root: for file systems and a network of its own.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import psutil

from benchmarks.random_kills.memory import Watch, growth_table, plot
from tests.storm import network
from tests.storm.measure import Files, files_of
from tests.storm.parts import BATCH_PORT, WORK_PORT, Part, parts
from tests.storm.run import StormRun
from tests.storm.verdict import Times, verdict
from tests.storm.weather import BREAK_S, Weather
from tests.support.processes.small_disk import SmallDisk, small_disk

DISK_BYTES: Final = 2**30
START_S: Final = 600.0
RECOVER_S: Final = 60.0
SAMPLE_S: Final = 2.0
GROWING: Final = ("ledger", "archive", "metrics.jsonl", "logs", "ballast", "checkpoints/damaged", "checkpoints/.")
SHARED: Final = Path("/dev/shm")
PARTS: Final = tuple(parts(SHARED))


class Storm:
    """One run, its weather, and what was seen of both."""

    def __init__(self, run: StormRun, weather: Weather) -> None:
        self.run, self.weather = run, weather
        self.watch = Watch(psutil.Process())
        self.files: list[Files] = []
        self.attacks = ""
        self._begin = time.monotonic()
        self._sampled = 0.0

    def look(self) -> None:
        """Sample memory and files now and then."""
        now = time.monotonic() - self._begin
        if now - self._sampled >= SAMPLE_S:
            self._sampled = now
            self.watch.sample(now)
            self.files.append(files_of(self.run.directory, GROWING))

    def blow(self, quiet_s: float, storm_s: float) -> Times:
        """The quiet part, then the storm, then a minute to recover in."""
        run = self.run
        run.wait_batches(10, START_S, self.look)
        quiet_from = _unix_s()
        run.wait(quiet_s, self.look)
        storm_from, watched_from_s = _unix_s(), time.monotonic() - self._begin
        self.files.clear()
        run.attack()
        for event in self.weather.blow(storm_s):
            print(event, flush=True)
        storm_to, watched_to_s = _unix_s(), time.monotonic() - self._begin
        self.attacks = run.calm()
        run.wait(RECOVER_S, self.look)
        return Times(
            quiet_from=quiet_from, storm_from=storm_from, storm_to=storm_to,
            watched_from_s=watched_from_s, watched_to_s=watched_to_s,
        )  # fmt: skip


def _unix_s() -> float:
    """The time as metrics.jsonl has it."""
    return datetime.now(UTC).timestamp()


def main() -> None:
    """Run, disturb, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="of all parts together, the quiet ones included")
    parser.add_argument("--quiet", type=float, default=5.0, help="minutes without any disturbance at the beginning of each")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this one")
    parser.add_argument("--break", dest="break_s", type=float, default=BREAK_S, help="mean seconds between two events")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, default=Path("runs/storm"), help="gets the reports, plots and logs")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    arguments = parser.parse_args()
    network.enter("tests.storm")
    shutil.rmtree(arguments.directory, ignore_errors=True)
    chosen = arguments.part or PARTS
    failed = []
    for name in chosen:
        place = Path(tempfile.mkdtemp(prefix="gspo-storm-", dir=SHARED))
        try:
            with small_disk(place / "run", DISK_BYTES) as disk:
                failed += storm(arguments, parts(place)[name], place, disk, arguments.minutes / len(chosen))
        finally:
            shutil.rmtree(place, ignore_errors=True)
    sys.exit(1 if failed else 0)


def storm(arguments: argparse.Namespace, part: Part, place: Path, disk: SmallDisk, minutes: float) -> list[str]:
    """One part; returns what did not hold."""
    to = arguments.directory / part.name
    to.mkdir(parents=True)
    run = StormRun(part, place, arguments.seed, *arguments.overrides)
    weather = Weather(
        psutil.Process(), run.directory, disk, (WORK_PORT, BATCH_PORT), part.roles,
        random.Random(arguments.seed), lambda seconds: run.wait(seconds, watched.look), arguments.break_s,
    )  # fmt: skip
    watched = Storm(run, weather)
    try:
        with run:
            quiet_s = 60 * arguments.quiet
            times = watched.blow(quiet_s, 60 * minutes - quiet_s)
            status = run.stop()
        lines, failed = verdict(part, run, weather, watched.watch, watched.files, times, status)
    finally:
        shutil.copytree(run.directory / "logs", to / "logs", dirs_exist_ok=True)
        for log in place.glob("*.log"):
            shutil.copy(log, to / log.name)
    lives = watched.watch.lives.values()
    plot(lives, [times.watched_from_s + event.time_s for event in weather.events], to / "memory.png")
    where = f"{datetime.now(UTC):%Y-%m-%d}, {psutil.cpu_count()} cores"
    head = f"{part.name}: {minutes:g} minutes, seed {arguments.seed}, {where}"
    text = [head, *lines, watched.attacks, "", growth_table(lives), "", *(f"FAILED: {each}" for each in failed)]
    print("\n".join(text), flush=True)
    (to / "report.txt").write_text("\n".join(text) + "\n")
    events = [{"time_s": each.time_s, "card": str(each.card), "detail": each.detail} for each in weather.events]
    (to / "storm.json").write_text(json.dumps({"events": events, "lines": lines, "failed": failed}, indent=1) + "\n")
    return failed


if __name__ == "__main__":
    main()

"""An hour of everything at once against a whole run: does it learn, lose nothing, leak nothing, and keep its pace?

make test-storm            # or: python -m tests.storm --minutes 60 --quiet 8 --seed 0

First the run works undisturbed for --quiet minutes, which gives its pace. Then the storm: processes are killed and
suspended, its disk fills, bits of its checkpoints flip, and a peer with keys of its own attacks its sockets. At the end the
run is stopped as a user stops it. These must hold: the held-out reward rose, the audit is clean, nothing was dropped as
stale, the pace was at least 0.7 of the quiet one, memory and files did not grow, nothing is left behind. The exit status is
1 when one does not. The run's directory is a file system of its own (tmpfs), for which this needs the right to mount.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import psutil

from benchmarks.random_kills.memory import Watch, growth_table, plot
from gspo_services.runs.opening import audit_run
from tests.storm.measure import Files, files_of, largest_median, memory_by_role, trajectories_per_s
from tests.storm.run import StormRun
from tests.storm.weather import Event, Weather
from tests.support.processes.small_disk import SmallDisk, small_disk

PACE: Final = 0.7
RISE: Final = 0.1
DISK_BYTES: Final = 3 * 2**30
START_S: Final = 600.0
RECOVER_S: Final = 60.0
SAMPLE_S: Final = 2.0
GROWING: Final = ("ledger", "archive", "metrics.jsonl", "logs", "ballast", "checkpoints/damaged", "checkpoints/.")
SHARED: Final = Path("/dev/shm")


class Storm:
    """The whole program: a run, its weather, and what was measured."""

    def __init__(self, run: StormRun, weather: Weather, *, quiet_s: float, storm_s: float) -> None:
        self._run, self._weather = run, weather
        self._quiet_s, self._storm_s = quiet_s, storm_s
        self.watch = Watch(run.root)
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
            self.files.append(files_of(self._run.directory, GROWING))

    def blow(self) -> None:
        """The quiet part, then the storm, then a minute to recover in."""
        run = self._run
        run.wait_batches(10, START_S, self.look)
        self.quiet_from = _unix_s()
        run.wait(self._quiet_s, self.look)
        self.storm_from, self.storm_from_s = _unix_s(), time.monotonic() - self._begin
        self.files.clear()
        run.attack()
        for event in self._weather.blow(self._storm_s):
            print(event, flush=True)
        self.storm_to, self.storm_to_s = _unix_s(), time.monotonic() - self._begin
        self.attacks = run.calm()
        run.wait(RECOVER_S, self.look)

    def verdict(self, status: int) -> tuple[list[str], list[str]]:
        """What was measured, and what did not hold."""
        run = self._run
        batches = run.trained()
        quiet = trajectories_per_s(batches, self.quiet_from, self.storm_from)
        storm = trajectories_per_s(batches, self.storm_from, self.storm_to)
        audit = audit_run(run.directory)
        rewards = [row["eval/reward"] for row in run.rows("eval") if row["eval/reward"] is not None]
        dropped = Counter(row["reason"] for row in run.rows("dropped"))
        memory = memory_by_role(list(self.watch.lives.values()), self.storm_from_s, self.storm_to_s)
        before, after = largest_median(self.files)
        lines = [
            f"batches {audit.num_batches}, trained again {audit.num_trained_again}, dropped groups {dict(dropped)}",
            f"pace: {quiet:.1f} trajectories/s quiet, {storm:.1f} in the storm: {storm / quiet:.2f}",
            f"held-out reward: first {rewards[0]:.2f}, best {max(rewards):.2f}, last {rewards[-1]:.2f}",
            f"files: {before.number} with {before.num_bytes / 2**20:.1f} MiB, at the end {after.number} with "
            f"{after.num_bytes / 2**20:.1f} MiB",
            *(
                f"memory of {each.role}: {each.first / 2**20:.0f} MiB, at the end {each.last / 2**20:.0f}, at most "
                f"{each.largest / 2**20:.0f}"
                for each in memory
            ),
            self.attacks,
        ]
        checks = [
            (f"gspo run ended with status {status}:\n{run.tail()}", status != 0),
            (f"the audit objects: {audit.problems[:3]}", not audit.clean),
            (
                f"the reward did not rise by {RISE}: {rewards[0]:.2f}, then {rewards[-1]:.2f}",
                rewards[-1] < rewards[0] + RISE,
            ),
            (f"{dropped['stale']} groups were dropped as stale", bool(dropped["stale"])),
            (f"the pace is {storm / quiet:.2f} of the quiet one", storm < PACE * quiet),
            *((f"the memory of the {each.role} grew", each.grew) for each in memory),
            *((f"the {each.role} held {each.largest / 2**20:.0f} MiB at once", each.burst) for each in memory),
            (
                f"files grew from {before} to {after}",
                after.number > before.number + 16 or after.num_bytes > 1.3 * before.num_bytes,
            ),
            (f"processes are left: {self.watch.leftovers()}", bool(self.watch.leftovers())),
            (f"weights are left: {sorted(run.weights.iterdir())}", any(run.weights.iterdir())),
        ]
        return lines, [text for text, wrong in checks if wrong]


def _unix_s() -> float:
    """The time as metrics.jsonl has it."""
    return datetime.now(UTC).timestamp()


def main() -> None:
    """Run, disturb, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="the storm's length, the quiet part included")
    parser.add_argument("--quiet", type=float, default=8.0, help="minutes without any disturbance at the beginning")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, default=Path("runs/storm"), help="gets the report, the plot and the logs")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    arguments = parser.parse_args()
    shutil.rmtree(arguments.directory, ignore_errors=True)
    arguments.directory.mkdir(parents=True)
    place = Path(tempfile.mkdtemp(prefix="gspo-storm-", dir=SHARED))
    try:
        with small_disk(place / "run", DISK_BYTES) as disk:
            failed = storm(arguments, place, disk)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    sys.exit(1 if failed else 0)


def storm(arguments: argparse.Namespace, place: Path, disk: SmallDisk) -> list[str]:
    """One whole storm; returns what did not hold."""
    quiet_s = 60 * arguments.quiet
    run = StormRun(place, arguments.seed, *arguments.overrides)
    try:
        with run:
            weather = Weather(
                run.root, run.directory, disk, random.Random(arguments.seed), lambda s: run.wait(s, watched.look)
            )
            watched = Storm(run, weather, quiet_s=quiet_s, storm_s=60 * arguments.minutes - quiet_s)
            watched.blow()
            status = run.stop()
        lines, failed = watched.verdict(status)
    finally:
        shutil.copytree(run.directory / "logs", arguments.directory / "logs", dirs_exist_ok=True)
        shutil.copy(place / "run.log", arguments.directory / "run.log")
    plot(watched.watch.lives.values(), [event.time_s for event in weather.events], arguments.directory / "memory.png")
    _print(arguments, weather.events, lines, failed, growth_table(watched.watch.lives.values()))
    return failed


def _print(arguments: argparse.Namespace, events: list[Event], lines: list[str], failed: list[str], table: str) -> None:
    kinds = Counter(event.kind for event in events)
    head = f"{arguments.minutes:g} minutes, seed {arguments.seed}, {datetime.now(UTC):%Y-%m-%d}, {psutil.cpu_count()} cores"
    text = [head, ", ".join(f"{number} x {kind}" for kind, number in sorted(kinds.items())), *lines, "", table, ""]
    text += [f"FAILED: {each}" for each in failed]
    print("\n".join(text))
    record = {"events": [vars(event) for event in events], "lines": lines, "failed": failed}
    (arguments.directory / "storm.json").write_text(json.dumps(record, indent=1) + "\n")
    (arguments.directory / "report.txt").write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()

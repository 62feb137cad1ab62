"""A run of ten thousand batches: what of it grows, and whether anything grows faster than what it holds.

    python -m benchmarks.growth
    python -m benchmarks.growth --batches 2000 --json growth.json

A real broker (ZeroMQ, SQLite, its files) with rollouts that have no engines and a learner that trains nothing: a batch has
16 trajectories in two groups, and 200 metrics. At each mark the broker's CPU a batch since the mark before, its memory, its
open files and what is on disk are noted; then the commands of a long run are used on it while it goes on, and the broker is
killed and started again. The table ends with the power of the batches with which a figure grows beyond its first value: 1
is in proportion, and "stays" is at most a tenth more.

CPU seconds mean something on a busy machine, times do not. The exit status is 1 where a power is certainly above --most.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import psutil
import zmq.asyncio

from benchmarks.broker_intake.child import Child
from benchmarks.fleet.broker import MeasuredProcess
from benchmarks.fleet.learner import FakeLearner
from benchmarks.fleet.load import run_settings
from benchmarks.fleet.measure import FakeFleet
from benchmarks.growth.costs import COMMANDS, command_costs, view_costs
from benchmarks.growth.slopes import Slope, growth
from benchmarks.markdown import table as markdown
from gspo_services.runs.audit import audit_run
from gspo_services.shared.runtime.clock import MonotonicClock
from gspo_services.shared.runtime.logs import configure_logging

ROLLOUTS: Final = 8
CHUNK_TOKENS: Final = 8
NUM_METRICS: Final = 200
LEASE_S: Final = 15.0
SHARES: Final = (0.01, 0.1, 0.2, 0.4, 0.7, 1.0)
"""Of all batches, at which to look."""
LEAST: Final = 20
"""Batches between two marks."""


@asynccontextmanager
async def the_run(directory: Path) -> AsyncIterator[tuple[MeasuredProcess, FakeLearner]]:
    """A broker that works as fast as it can."""
    context = zmq.asyncio.Context()
    settings = run_settings(ROLLOUTS, CHUNK_TOKENS, LEASE_S)
    async with MeasuredProcess(directory, settings, "gspo_services.broker").running() as broker:
        with ExitStack() as stack:
            stack.callback(context.destroy, linger=0)
            learner = FakeLearner(context, broker.batch_endpoint, MonotonicClock(), num_metrics=NUM_METRICS)
            arguments = (broker.work_endpoint, "0", str(CHUNK_TOKENS))
            fleet = FakeFleet([stack.enter_context(Child("benchmarks.fleet.member", *arguments))])
            learning = asyncio.get_running_loop().create_task(learner.run(), name="learner")
            try:
                await fleet.join(ROLLOUTS)
                yield broker, learner
            finally:
                learning.cancel()
                await asyncio.wait([learning])


async def reached(learner: FakeLearner, batches: int, broker: MeasuredProcess) -> None:
    """Wait until so many batches are trained. Raises: RuntimeError when the broker has ended."""
    while learner.num_batches < batches:
        broker.cpu_s()
        await asyncio.sleep(0.05)


def on_disk(run: Path) -> dict[str, float]:
    """MiB by kind, and the number of files."""
    sizes = {path: path.stat().st_size for path in run.rglob("*") if path.is_file()}
    of = {"ledger MiB": "ledger", "metrics MiB": "metrics"}
    found = {kind: sum(size for path, size in sizes.items() if path.name.startswith(name)) for kind, name in of.items()}
    other = sum(sizes.values()) - sum(found.values())
    return {**{kind: size / 2**20 for kind, size in found.items()}, "other MiB": other / 2**20, "files": len(sizes)}


async def figures(broker: MeasuredProcess, cpu_s: float, batches: int) -> dict[str, float]:
    """All figures of one mark. ``cpu_s``: of the broker for the last ``batches``."""
    takes, run = broker.takes(), broker.run_directory
    found: dict[str, float] = {"broker CPU ms a batch": 1e3 * cpu_s / batches}
    found |= {"broker MiB": takes["rss_mib"], "open files": takes["files"], **on_disk(run)}
    for name in COMMANDS:
        taken = await asyncio.to_thread(command_costs, name, run)
        found |= {f"{name} CPU s": taken["cpu_s"], f"{name} MiB": taken["mib"]}
    taken = await asyncio.to_thread(view_costs, run)
    found |= {"view CPU s": taken["cpu_s"], "view MiB": taken["mib"]}
    await broker.kill()
    return {**found, "resume CPU s": broker.cpu_s()}


async def measured(directory: Path, marks: list[int]) -> list[dict[str, float]]:
    """The figures at each of ``marks``."""
    found = []
    async with the_run(directory) as (broker, learner):
        before, cpu_s = 0, broker.cpu_s()
        for mark in marks:
            await reached(learner, max(mark, before + LEAST), broker)
            done, spent = learner.num_batches, broker.cpu_s()
            found.append({"batches": done, **await figures(broker, spent - cpu_s, done - before)})
            _say(f"{done} batches: " + ", ".join(f"{name} {value:.4g}" for name, value in list(found[-1].items())[1:]))
            before, cpu_s = learner.num_batches, broker.cpu_s()
        await broker.terminate()
    problems = audit_run(broker.run_directory).problems
    if problems:
        raise RuntimeError(f"the audit finds: {problems[0]}")
    return found


def table(found: list[dict[str, float]], slopes: dict[str, Slope | None]) -> str:
    """A row for each figure."""
    rows = [[name, *(f"{row[name]:.3g}" for row in found), power or "stays"] for name, power in slopes.items()]
    return markdown(["figure", *(f"{row['batches']:,.0f}" for row in found), "power"], rows)


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.growth", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=10_000, help="of the run (default: %(default)s)")
    parser.add_argument("--most", type=float, default=1.1, help="power that no figure may certainly exceed (%(default)s)")
    parser.add_argument("--directory", type=Path, help="where the run is written (default: the temporary directory)")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args(arguments)
    if options.batches < 100:
        parser.error(f"--batches is {options.batches}: use at least 100")
    configure_logging("growth", "error")
    marks = [round(share * options.batches) for share in SHARES]
    busy = psutil.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="growth-", dir=options.directory) as name:
        found = asyncio.run(measured(Path(name), marks))
    batches = [int(row["batches"]) for row in found]
    slopes = {figure: growth(batches, [row[figure] for row in found]) for figure in found[0] if figure != "batches"}
    print(table(found, slopes))
    print(f"\nload at the start: {busy:.1f} on {psutil.cpu_count()} cores")
    if options.json is not None:
        kept: dict[str, Any] = {
            "marks": found,
            "powers": {figure: list(each) for figure, each in slopes.items() if each is not None},
            "load": busy,
        }
        options.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    fast = [figure for figure, each in slopes.items() if each is not None and each.power - each.half > options.most]
    if fast:
        print(f"faster than batches ** {options.most:g}: {', '.join(fast)}")
    return 1 if fast else 0


if __name__ == "__main__":
    sys.exit(main())

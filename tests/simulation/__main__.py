"""Simulated runs from the command line.

python -m tests.simulation --seed 17                  one seed, with its whole history
python -m tests.simulation --seeds 0..1000 --jobs 2   many; shortens the first failing run and prints its history
"""

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from logging import DEBUG, INFO, WARNING

from tests.simulation.bugs import BUGS, planted
from tests.simulation.search.shrink import shrink
from tests.simulation.weather import plan_of
from tests.simulation.world import Outcome, simulate

TELL_EVERY = 100


def main(arguments: Sequence[str] | None = None) -> int:
    bugs = [bug.name for bug in BUGS]
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, help="replay one seed and print its whole history")
    which.add_argument("--seeds", type=_range, metavar="FIRST..END", help="run these seeds; END is not included")
    parser.add_argument("--jobs", type=int, default=1, help="number of worker processes")
    parser.add_argument("--no-shrink", action="store_true", help="print a failing run without shortening it first")
    parser.add_argument("--plant", metavar="BUG", choices=bugs, help=f"plant a bug in the services: {', '.join(bugs)}")
    parser.add_argument("--debug", action="store_true", help="include the services' debug lines in the history")
    options = parser.parse_args(arguments)
    bug = next((bug for bug in BUGS if bug.name == options.plant), None)
    with nullcontext() if bug is None else planted(bug):
        if options.seed is not None:
            outcome = simulate(plan_of(options.seed), log_level=DEBUG if options.debug else INFO)
            tell(outcome)
            return int(outcome.violation is not None)
        return run_many(options.seeds, jobs=options.jobs, shorten=not options.no_shrink)


def run_many(seeds: range, *, jobs: int, shorten: bool) -> int:
    """Run seeds in ``jobs`` processes; returns 1 when one of them failed."""
    begin = time.monotonic()
    happened: Counter[str] = Counter()
    failed: list[int] = []
    virtual_s = 0.0
    with multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=500) as pool:
        for done, (seed, short) in enumerate(pool.imap_unordered(_run, seeds, chunksize=4), start=1):
            happened += short.happened
            virtual_s += short.virtual_s
            if short.violation is not None:
                failed.append(seed)
                print(f"seed {seed}: {short.violation.invariant}: {short.violation.text}", flush=True)
            if done % TELL_EVERY == 0:
                print(f"{done} of {len(seeds)} seeds, {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    if failed:
        first = simulate(plan_of(min(failed)))
        tell(shrink(first) if shorten and first.violation is not None else first)
    took_s = time.monotonic() - begin
    print(f"{len(seeds)} seeds, {virtual_s:.0f} virtual seconds in {took_s:.0f} s: {len(failed)} failed {failed or ''}")
    for name, count in sorted(happened.items()):
        if not name.startswith("log: "):
            print(f"{count:9}  {name}")
    return int(bool(failed))


def _run(seed: int) -> tuple[int, Outcome]:
    outcome = simulate(plan_of(seed), log_level=WARNING)
    outcome.history.clear()
    return seed, outcome


def told(outcome: Outcome) -> str:
    """Return what ``tell`` prints."""
    text = StringIO()
    with redirect_stdout(text):
        tell(outcome)
    return text.getvalue()


def tell(outcome: Outcome) -> None:
    """Print the history of a run."""
    plan = outcome.plan
    settings = {name: value for name, value in vars(plan).items() if name != "events"}
    print(f"seed {plan.seed}: " + ", ".join(f"{name} {value}" for name, value in settings.items() if name != "seed"))
    for event in plan.events:
        print(f"{event.at:9.3f}  planned        {event}")
    for line in outcome.history:
        print(line)
    print("nothing was broken" if outcome.violation is None else f"broken: {outcome.violation.invariant}")


def _range(text: str) -> range:
    first, _, end = text.partition("..")
    return range(int(first), int(end))


if __name__ == "__main__":
    sys.exit(main())

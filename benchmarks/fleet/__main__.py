"""What a fleet of N rollouts takes of one broker, for growing N, and what of it grows faster than linearly.

    python -m benchmarks.fleet --rollouts 10 100
    python -m benchmarks.fleet --rollouts 10 100 300 1000 --pace 2 --json fleet.json --plot fleet.png
    python -m benchmarks.fleet --rollouts 300 --profile

Each fleet gets a real broker process of its own: ZeroMQ, SQLite, the ledger. Its rollouts have no engines, but everything
else: a connection under a name and a session of its own, 64 episodes, heartbeats, leases, and chunks that leave together.
Many of them share a process. Lengths have a heavy tail (Pareto, 2 to 128 chunks). A learner takes every batch with its
tokens and announces the next version. For each fleet:

    1. all join; --seconds to warm up, then --seconds are measured          steady
    2. a tenth is killed, a twentieth leaves, as many join; --seconds       changing
    3. kill -9 of the broker, which starts again at once                    recovery
    4. gspo audit, and each trajectory: nothing acknowledged is lost        proof

How to read the figures: CPU seconds of the broker mean something on a busy machine, times do not. "exponent" is the power of
N with which a figure grows between the two largest fleets; "linear" is 1, and 0 for what is per chunk. Latencies hold the
fleet's own delay: "fleet_loop_late_ms" in the JSON is how late its processes were.
"""

import argparse
import asyncio
import json
import platform
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import psutil

from benchmarks.fleet.figures import Result, draw, growth, table, too_fast
from benchmarks.fleet.limits import what_is_too_small
from benchmarks.fleet.load import Load
from benchmarks.fleet.measure import Plan, measured
from benchmarks.fleet.profiled_broker import PROFILE_FILE
from gspo_services.shared.runtime.logs import configure_logging


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options. Ends the process where they are wrong, or where the machine's limits are too small for them."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fleet", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rollouts", type=int, nargs="+", default=[10, 100], metavar="N", help="sizes of fleets, each on its own"
    )
    parser.add_argument(
        "--pace", type=float, default=8.0, help="chunks a second of each rollout; 0: as many as are acknowledged"
    )
    parser.add_argument("--chunk-tokens", type=int, default=64, help="tokens of a chunk")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase: warming up, steady, changing")
    parser.add_argument("--lease-s", type=float, default=15.0, help="broker.lease_s")
    parser.add_argument("--recover-s", type=float, default=120.0, help="how long a fleet may take to work again")
    parser.add_argument("--churn", type=float, default=0.1, help="share of the fleet that is killed in phase 2")
    parser.add_argument(
        "--processes", type=int, default=0, help="that hold the rollouts (default: one for 250 of them, at least 2)"
    )
    parser.add_argument("--directory", type=Path, help="where ledgers are written (default: the temporary directory)")
    parser.add_argument("--json", type=Path, help="write all figures here, after each fleet")
    parser.add_argument("--plot", type=Path, help="draw each figure over N here")
    parser.add_argument("--profile", action="store_true", help="run the broker under cProfile, and print where its CPU goes")
    options = parser.parse_args(arguments)
    if min(options.rollouts) < 1 or options.seconds <= 0 or options.pace < 0 or not 1 <= options.chunk_tokens <= 1024:
        parser.error("--rollouts from 1, --seconds above 0, --pace from 0, --chunk-tokens from 1 to 1024")
    options.rollouts = sorted(set(options.rollouts))
    for rollouts in options.rollouts:
        for objection in what_is_too_small(rollouts, processes_of(options, rollouts)):
            parser.error(objection)
    return options


def processes_of(options: argparse.Namespace, rollouts: int) -> int:
    """How many processes hold a fleet."""
    return int(min(rollouts, options.processes or max(2, -(-rollouts // 250))))


def plan_of(options: argparse.Namespace, rollouts: int) -> Plan:
    """How a fleet of this size is measured."""
    return Plan(
        rollouts=rollouts,
        processes=processes_of(options, rollouts),
        load=Load(pace=options.pace, chunk_tokens=options.chunk_tokens),
        seconds=options.seconds,
        lease_s=options.lease_s,
        recover_s=options.recover_s,
        churn=options.churn,
    )


def of_one_fleet(options: argparse.Namespace, rollouts: int) -> Result:
    """Measure one fleet in a directory of its own, and say how it goes."""
    module = "benchmarks.fleet.profiled_broker" if options.profile else "gspo_services.broker"
    with tempfile.TemporaryDirectory(prefix="fleet-", dir=options.directory) as name:
        directory = Path(name)
        result = asyncio.run(measured(directory, plan_of(options, rollouts), _say, module))
        if options.profile:
            print((directory / PROFILE_FILE).read_text(encoding="utf-8"), flush=True)
    return result


def faults(result: Result, recover_s: float) -> list[str]:
    """What must not be: tokens that are lost, rollouts that do not come back."""
    proof, working = result["proof"], result["recovery"]["working"]
    found = [*proof["missing"], *proof["audit_problems"]]
    if working < result["rollouts"]:
        found.append(f"{working} of {result['rollouts']} rollouts worked again within {recover_s:g} s")
    return found


def _say(text: str) -> None:
    print(f"  {datetime.now(tz=UTC):%H:%M:%S}  {text}", file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Measure all fleets; 1 where anything acknowledged was lost."""
    options = parsed(arguments)
    configure_logging("benchmark", "error")
    results: list[Result] = []
    wrong: list[str] = []
    about_s = sum(4 * options.seconds + 20 + rollouts / 10 for rollouts in options.rollouts)
    _say(f"fleets of {options.rollouts}: about {about_s / 60:.0f} minutes on an idle machine")
    for rollouts in options.rollouts:
        _say(f"a fleet of {rollouts} in {processes_of(options, rollouts)} processes")
        results.append(of_one_fleet(options, rollouts))
        wrong += [f"{rollouts} rollouts: {fault}" for fault in faults(results[-1], options.recover_s)]
        if options.json:
            made = {"made": datetime.now(tz=UTC).isoformat(timespec="seconds"), "machine": platform.platform()}
            chosen = {key: value for key, value in vars(options).items() if isinstance(value, int | float | list)}
            text = {**made, "cores": psutil.cpu_count(), "options": chosen, "fleets": results, "exponents": growth(results)}
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(text, indent=1))
    print("\n".join(table(results)), flush=True)
    for line in too_fast(results):
        print(f"faster than linearly: {line}", flush=True)
    if options.plot:
        draw(results, options.plot)
    for fault in wrong:
        print(f"FAULT: {fault}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

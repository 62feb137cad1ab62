"""A run of the demo with processes killed at random moments: does it learn, lose nothing, leak nothing?

make kills                 # or: python -m benchmarks.random_kills --kills 50 --seed 0

Every process of the run is a target: the broker, the learner, the rollouts' agents, and SGLang below them. Four of five
kills are SIGKILL, one is SIGTERM. After the last one the run continues undisturbed to its end. The checks are the held-out
reward, the audit of the ledger, that no process and no file outside the run's directory is left, and how much each process's
memory (USS) grew per minute. The exit status is 1 when a check fails. An interrupted run is not resumed: --directory is made
anew. With --database the brokers commit to a PostgreSQL of their own first, and that is a target, too.
"""

import argparse
import contextlib
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.random_kills.memory import Watch, growth_table, plot
from benchmarks.whole_runs import GSPO, TARGET, place, rows_of, run_words, tiny_model
from gspo_services.runs.audit import audit_run
from tests.support.postgres.fixtures import SynchronousDatabase, synchronous_database
from tests.support.postgres.server import programs

SAMPLE_S: Final = 2.0
GRACE_S: Final = 120.0
TARGETS: Final = ("broker", "learner", "rollout", "sglang", "scheduler")
DATABASE: Final = "database"
"""Killed, and started again at once on its disk: the run's own processes are what comes back by itself."""
MEMORY: Final = Path("/dev/shm")


@dataclass(frozen=True)
class Kill:
    """The killed process, the time (seconds since the start), and the batches trained by then."""

    time_s: float
    role: str
    signal: str
    batches: int


def main() -> None:
    """Run, kill, check, print, plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("examples/arithmetic.toml"))
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--batches", type=int, default=150, help="length of the run; kills are spread over its first 4/5")
    parser.add_argument("--delay", type=float, default=10.0, help="longest delay in seconds between a batch and its kill")
    parser.add_argument("--seed", type=int, default=0, help="seed of the kills and of the run")
    parser.add_argument("--directory", type=Path, default=Path("runs/kills"))
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--database", action="store_true", help="also commit to PostgreSQL, which must be installed")
    arguments = parser.parse_args()
    if arguments.database and programs() is None:
        parser.error("--database needs PostgreSQL: install it (Debian: apt-get install postgresql)")
    shutil.rmtree(arguments.directory, ignore_errors=True)
    weights = Path(tempfile.mkdtemp(prefix="gspo-kills-", dir=MEMORY))
    with synchronous_database() if arguments.database else contextlib.nullcontext() as database:
        if database is not None:
            arguments.overrides.append(f"broker.database={database.conninfo}")
        process = start(arguments, weights)
        watch = Watch(psutil.Process(process.pid))
        try:
            kills = disturb(process, watch, arguments, database)
        finally:
            end(process)
    rows = rows_of(arguments.directory / "run")
    left = sorted(weights.iterdir())
    shutil.rmtree(weights)
    failed = report(arguments, kills, watch, rows, process.returncode, left)
    sys.exit(1 if failed else 0)


def start(arguments: argparse.Namespace, weights: Path) -> "subprocess.Popen[bytes]":
    """Start the run as a user does; it may restart a process as often as there are kills."""
    directory: Path = arguments.directory
    directory.mkdir(parents=True)
    model = directory.parent / f"model-{arguments.seed}"
    tiny_model(model, arguments.seed)
    settings = [
        f"run.seed={arguments.seed}",
        f"run.num_batches={arguments.batches}",
        f"run.max_restarts={arguments.kills}",
        f"model.path={model}",
        f"rollout.weights_directory={weights}",
        *arguments.overrides,
    ]
    words = run_words(arguments.config, directory / "run", *settings)
    with (directory / "run.log").open("wb") as output:
        return subprocess.Popen([*GSPO, *words], stdout=output, stderr=output)


def disturb(
    process: "subprocess.Popen[bytes]", watch: Watch, arguments: argparse.Namespace, database: SynchronousDatabase | None
) -> list[Kill]:
    """Kill, watch the memory, and wait for the run's end.

    Each kill waits for its own batch, drawn uniformly, and then for a random moment. So kills are spread over the run
    however long it takes to recover, and several can coincide.
    """
    rng = random.Random(arguments.seed)
    begin = time.monotonic()
    plan = sorted(rng.uniform(1, 0.8 * arguments.batches) for _ in range(arguments.kills))
    due: list[float] = []
    kills: list[Kill] = []
    while process.poll() is None:
        now = time.monotonic() - begin
        watch.sample(now)
        trained = sum(row["event"] == "batch" for row in rows_of(arguments.directory / "run"))
        while plan and trained >= plan[0]:
            plan.pop(0)
            due.append(now + rng.uniform(0, arguments.delay))
        for moment in [moment for moment in due if moment <= now]:
            kill = kill_one(watch, rng, now, trained, database)
            if kill is not None:
                due.remove(moment)
                kills.append(kill)
                print(f"{now:6.0f} s  {trained:3d} batches  {kill.signal} {kill.role} ({len(kills)})", flush=True)
        try:
            process.wait(max(0.05, min([SAMPLE_S, *(moment - now for moment in due)])))
        except subprocess.TimeoutExpired:
            continue
    return kills


def kill_one(
    watch: Watch, rng: random.Random, now: float, trained: int, database: SynchronousDatabase | None
) -> Kill | None:
    """Choose a role first, then one of its processes, so that roles are hit equally often; None if no such process runs."""
    target = rng.choice(TARGETS if database is None else (*TARGETS, DATABASE))
    if target == DATABASE and database is not None:
        database.crash()
        return Kill(time_s=now, role=target, signal=signal.SIGKILL.name, batches=trained)
    number = rng.choice([signal.SIGKILL] * 4 + [signal.SIGTERM])
    candidates = [life.process for life in watch.lives.values() if life.role == target and life.process.is_running()]
    if not candidates:
        return None
    try:
        rng.choice(candidates).send_signal(number)
    except psutil.NoSuchProcess:
        return None
    return Kill(time_s=now, role=target, signal=number.name, batches=trained)


def end(process: "subprocess.Popen[bytes]") -> None:
    """Send Ctrl-C if the run is still alive: it stops everything that it started."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        process.wait(GRACE_S)


def report(
    arguments: argparse.Namespace,
    kills: list[Kill],
    watch: Watch,
    rows: list[dict[str, Any]],
    status: int,
    left_files: list[Path],
) -> list[str]:
    """Print and save the result; return the failed checks."""
    directory: Path = arguments.directory
    audit = audit_run(directory / "run")
    rewards = [row["eval/reward"] for row in rows if row["event"] == "eval"]
    dropped = Counter(row["reason"] for row in rows if row["event"] == "dropped")
    failed = [
        text
        for text, wrong in (
            (f"{len(kills)} of {arguments.kills} kills: use more --batches", len(kills) < arguments.kills),
            (f"the run ended with status {status}: {directory / 'run.log'}", status != 0),
            (f"the last held-out reward is {rewards[-1] if rewards else None}", not rewards or rewards[-1] < TARGET),
            (f"the audit objects: {audit.problems[:3]}", not audit.clean),
            (f"processes are left: {watch.leftovers()}", bool(watch.leftovers())),
            (f"files are left: {[str(path) for path in left_files]}", bool(left_files)),
        )
        if wrong
    ]
    signals = Counter(f"{kill.role} {kill.signal}" for kill in kills)
    minutes = max(life.times[-1] for life in watch.lives.values()) / 60
    print(f"\n{place(arguments.config)}")
    print(f"{len(kills)} kills; {minutes:.0f} minutes: " + ", ".join(f"{n} {what}" for what, n in sorted(signals.items())))
    print(f"batches {audit.num_batches}, trained again {audit.num_trained_again}, trajectories resumed {audit.num_resumed}")
    print(f"held-out reward: first {rewards[0]:.2f}, best {max(rewards):.2f}, last {rewards[-1]:.2f}")
    print(f"dropped groups: {dict(dropped)}\n")
    print(growth_table(watch.lives.values()))
    plot(watch.lives.values(), [kill.time_s for kill in kills], directory / "memory.png")
    record = {
        "kills": [vars(kill) for kill in kills],
        "rewards": rewards,
        "dropped": dropped,
        "audit": audit.as_plain(),
        "failed": failed,
        "memory": [
            {"role": life.role, "times_s": [round(time) for time in life.times], "uss_bytes": life.bytes}
            for life in watch.lives.values()
        ],
    }
    (directory / "kills.json").write_text(json.dumps(record) + "\n")
    print(f"\nplot: {directory / 'memory.png'}\n" + "\n".join(f"FAILED: {text}" for text in failed))
    return failed


if __name__ == "__main__":
    main()

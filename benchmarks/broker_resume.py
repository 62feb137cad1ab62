"""How long a broker takes to resume a run, and an audit to check it, by the number of trajectories in the ledger.

    python benchmarks/broker_resume.py --sizes 10000 100000 1000000 --directory /tmp/ledgers

Each ledger holds trained batches of 32 groups of 8 trajectories (two chunks of 40 tokens each), and one batch's groups that
are still under way. Each measurement runs in its own process.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gspo_protocol.messages import Chunk, GroupSampling, Segment, VersionRun
from gspo_services.broker.ledger import Ledger, LedgerConfig, batch_stats
from gspo_services.broker.metrics_file import METRICS_FILE, MetricsFile
from gspo_services.broker.rows import BatchRow, CheckpointedRow, GroupRow, Row, TrainedRow, TrajectoryRow, VersionRow
from gspo_services.broker.store import LEDGER_FILE, RowChanges, Store, stored_chunk
from gspo_services.runs.audit import audit_run
from gspo_services.shared.schedules import RunSchedules
from gspo_services.shared.settings import Settings, write_run_settings
from gspo_services.shared.settings.sections import BatchSection, Run

SAMPLING = GroupSampling(1.0, 16, 256, 256)

GROUP_SIZE, GROUPS_PER_BATCH, CHUNK_TOKENS, PROMPT_TOKENS = 8, 32, 40, 8
ACTION_TOKENS = 2 * CHUNK_TOKENS - PROMPT_TOKENS
NUM_METRICS = 60


def members(group_id: int, version: int, status: str) -> Iterator[TrajectoryRow]:
    for number in range(GROUP_SIZE):
        done = status == "finished"
        yield TrajectoryRow(
            trajectory_id=group_id * GROUP_SIZE + number,
            group_id=group_id,
            status="finished" if done else "free",
            epoch=1,
            num_tokens=2 * CHUNK_TOKENS,
            num_action_tokens=ACTION_TOKENS,
            version_sum=ACTION_TOKENS * version,
            min_version=version,
            num_turns=1,
            finish_reason="done" if done else None,
            turn_rewards=(float(number % 2),) if done else (),
        )


def chunks(row: TrajectoryRow, version: int, arrays: tuple[Any, Any]) -> list[Any]:
    stored = []
    for start in (0, CHUNK_TOKENS):
        num_prompt = PROMPT_TOKENS if start == 0 else 0
        prompt = [Segment("observation", 0, num_prompt)] if num_prompt else []
        of_prompt = [VersionRun(-1, num_prompt)] if num_prompt else []
        chunk = Chunk(
            trajectory_id=row.trajectory_id,
            epoch=1,
            offset=start,
            num_tokens=CHUNK_TOKENS,
            segments=[*prompt, Segment("action", 0, CHUNK_TOKENS - num_prompt)],
            version_runs=[*of_prompt, VersionRun(version, CHUNK_TOKENS - num_prompt)],
        )
        stored.append(stored_chunk(chunk, *arrays))
    return stored


def num_batches_of(num_trajectories: int) -> int:
    """Whole batches."""
    return round(num_trajectories / GROUP_SIZE / GROUPS_PER_BATCH)


def write_ledger(directory: Path, num_trajectories: int, *, fingerprint: str = "f", num_uncheckpointed: int = 0) -> None:
    """Make a run that has trained ``num_trajectories`` (rounded to whole batches).

    No checkpoint covers the last ``num_uncheckpointed`` batches.
    """
    directory.mkdir(parents=True)
    batch_section = BatchSection(group_size=GROUP_SIZE, groups_per_batch=GROUPS_PER_BATCH)
    num_batches = num_batches_of(num_trajectories)
    last_checkpointed = num_batches - num_uncheckpointed
    arrays = (np.arange(CHUNK_TOKENS, dtype=np.int32), np.zeros(CHUNK_TOKENS, dtype=np.float32))
    with Store(directory / LEDGER_FILE, fingerprint=fingerprint, run_id="benchmark") as store:
        write_run_settings(Settings(run=Run(directory=directory), batch=batch_section))
        for batch in range(num_batches + 1):
            under_way = batch == num_batches
            version = batch + 1
            rows: list[Row] = [
                VersionRow(
                    policy_version=version, endpoint="tcp://x", digest="d", num_bytes=1, trained_batches=batch, vocabulary=0
                )
            ]
            groups, stored = [], []
            for group_id in range(batch * GROUPS_PER_BATCH, (batch + 1) * GROUPS_PER_BATCH):
                group = list(members(group_id, version, "free" if under_way else "finished"))
                groups.append(group)
                status = "open" if under_way else "batched"
                rows += group
                rows.append(
                    GroupRow(
                        group_id=group_id,
                        split="train",
                        prompt=group_id,
                        task_index=group_id,
                        evaluation=None,
                        sampling=SAMPLING,
                        status="open" if status == "open" else "batched",
                        batch=None if under_way else batch,
                    )
                )
                stored += [chunk for row in group for chunk in chunks(row, version, arrays)]
            line: dict[str, Any] = {"event": "batch", "batch": batch, "policy_version": version + 1, "time_s": float(batch)}
            if not under_way:
                ids = tuple(group[0].group_id for group in groups)
                rows.append(
                    BatchRow(
                        index=batch,
                        policy_version=version,
                        group_ids=ids,
                        stats=batch_stats(version, groups),
                        samplings=(SAMPLING,) * len(ids),
                    )
                )
                checkpointed = CheckpointedRow(next_batch=min(batch + 1, last_checkpointed))
                rows += [TrainedRow(index=batch, policy_version=version + 1), checkpointed]
                line |= {f"metric_{number}": number / 7 for number in range(NUM_METRICS)}
            store.commit(RowChanges(rows=rows, chunks=stored, lines=[] if under_way else [line]))
        MetricsFile(directory / METRICS_FILE).append(store.metrics_after(0))


def resume(directory: Path) -> None:
    """Read everything that a broker reads before it binds its sockets."""
    MetricsFile(directory / METRICS_FILE)
    with Store(directory / LEDGER_FILE, fingerprint="f", run_id="benchmark") as store:
        config = LedgerConfig(
            run_id=store.run_id, fingerprint="f", seed=0, num_batches=10**6, group_size=GROUP_SIZE,
            groups_per_batch=GROUPS_PER_BATCH, max_lag=2, schedules=RunSchedules(Settings()),
            lease_s=15.0, idle_lease_s=900.0, max_attempts=4,
            failure_budget=20, evaluate_every_batches=0, num_eval_tasks=0, num_train_tasks=None,
        )  # fmt: skip
        ledger = Ledger(config, store.contents(), 0.0)
        store.elapsed_s()
        assert ledger.state.groups.num_training == GROUPS_PER_BATCH


def measure(what: str, directory: Path) -> dict[str, float]:
    begin, cpu_begin = time.perf_counter(), time.process_time()
    if what == "resume":
        resume(directory)
    else:
        audit = audit_run(directory)
        assert audit.clean, audit.problems[:5]
    seconds, cpu_s = time.perf_counter() - begin, time.process_time() - cpu_begin
    return {"seconds": seconds, "cpu_s": cpu_s, "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000], help="trajectories")
    parser.add_argument("--directory", type=Path, required=True, help="where ledgers are made, and kept for the next run")
    parser.add_argument("--measure", choices=["resume", "audit"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.directory)))
        return
    print("| trajectories | ledger (MiB) | resume (s; CPU) | audit (s; CPU) | audit's memory (MiB) |")
    print("|---|---|---|---|---|")
    for size in arguments.sizes:
        directory = arguments.directory / str(size)
        if not directory.exists():
            write_ledger(directory, size)
        results = []
        for what in ("resume", "audit"):
            command = [sys.executable, __file__, "--directory", str(directory), "--measure", what]
            results.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        mib = (directory / LEDGER_FILE).stat().st_size / 2**20
        times = [f"{result['seconds']:.2f}; {result['cpu_s']:.2f}" for result in results]
        print(f"| {size:,} | {mib:,.0f} | {times[0]} | {times[1]} | {results[1]['mib']:.0f} |", flush=True)


if __name__ == "__main__":
    main()

"""A ledger of a great many trajectories, written straight into its tables: what fake engines would leave, in a minute."""

import json
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from gspo.diagnostics import LAG_BUCKETS
from gspo_protocol.messages import Chunk, GroupSampling, Segment, VersionRun
from gspo_services.broker.rows import (
    BatchRow,
    BatchStats,
    EvaluationRow,
    GroupRow,
    LengthStats,
    TrainedRow,
    TrajectoryRow,
    VersionRow,
)
from gspo_services.broker.store import LEDGER_FILE, MARK_FILE, RowChanges, Store, chunk_checksum, row_checksum, stored_chunk
from gspo_services.broker.store.schema import TABLES
from gspo_services.shared.settings import write_run_settings
from gspo_services.shared.settings.sections import BatchSection, Run, Settings

SAMPLING: Final = GroupSampling(1.0, 16, 256, 256)

GROUP_SIZE: Final = 8
GROUPS_PER_BATCH: Final = 32
NUM_TASKS: Final = 512
PROMPT, ANSWER = 9, 15
NAMES: Final = [
    *("sequences", "tokens", "lag", "advantage", "objective", "clip_fraction", "clip_fraction_high", "clip_fraction_low"),
    *("clip_fraction_dual", "clip_range_low", "clip_range_high", "ratio_mean", "ratio_min", "ratio_max", "mismatch_kl"),
    *("effective_sample_size", "mismatch_weight", "log_ratio_error", "rejected_sequences", "clamped_tokens", "entropy"),
    *("zero_advantage_sequences", "signal_sequences", "ratio_p01", "ratio_p50", "ratio_p99", "mismatch", "groups"),
    "zero_advantage_groups",
]
"""What a learner reports for each bucket."""
BUCKETS: Final = ("all", *(name for name, _ in LAG_BUCKETS[:3]), "advantage_positive", "advantage_negative")


def write_big_ledger(directory: Path, num_trajectories: int) -> None:
    """A run of ``num_trajectories`` in whole batches, with their tokens and metrics lines, and evaluations of NUM_TASKS."""
    directory.mkdir(parents=True)
    num_batches = num_trajectories // (GROUP_SIZE * GROUPS_PER_BATCH)
    with Store(directory / LEDGER_FILE, fingerprint="big", run_id="big") as store:
        store.commit(RowChanges())
    (directory / MARK_FILE).unlink()
    batch = BatchSection(group_size=GROUP_SIZE, groups_per_batch=GROUPS_PER_BATCH)
    write_run_settings(Settings(run=Run(directory=directory, num_batches=num_batches), batch=batch))
    connection = sqlite3.connect(directory / LEDGER_FILE, isolation_level=None)
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("PRAGMA cache_size = -200000")
    connection.execute("BEGIN")
    _insert(connection, BatchRow, (_batch(index) for index in range(num_batches)))
    _insert(connection, VersionRow, (_version(index) for index in range(num_batches + 1)))
    _insert(connection, TrainedRow, (TrainedRow(index=index, policy_version=index + 2) for index in range(num_batches)))
    _insert(connection, GroupRow, (_group(group) for group in range(num_batches * GROUPS_PER_BATCH)))
    first = num_batches * GROUPS_PER_BATCH
    evaluations = [
        EvaluationRow(
            evaluation_id=at,
            policy_version=at * 50 + 1,
            batch=at * 50,
            num_tasks=64,
            status="done",
            reward=0.5,
            num_finished=64,
        )
        for at in range(num_batches // 50)
    ]
    _insert(connection, EvaluationRow, evaluations)
    _insert(connection, GroupRow, (_held_out(first, at, task) for at in range(len(evaluations)) for task in range(64)))
    total = first * GROUP_SIZE + 64 * len(evaluations)
    table = TABLES[TrajectoryRow]
    connection.executemany(table.insert, _trajectories(first, total))
    connection.executemany("INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?, ?)", _chunks(total))
    connection.executemany("INSERT INTO metrics_lines VALUES (?, ?, ?)", _metrics_lines(num_batches, evaluations))
    connection.execute("COMMIT")
    connection.close()


def _insert(connection: sqlite3.Connection, row_type: type[Any], rows: Any) -> None:
    table = TABLES[row_type]
    connection.executemany(table.insert, (table.values(row) for row in rows))


def _batch(index: int) -> BatchRow:
    first = index * GROUPS_PER_BATCH
    size = GROUPS_PER_BATCH * GROUP_SIZE
    stats = BatchStats(
        num_groups=GROUPS_PER_BATCH,
        num_trajectories=size,
        num_tokens=size * (PROMPT + ANSWER),
        num_action_tokens=size * ANSWER,
        mean_reward=0.5,
        mean_lag=1.0,
        max_lag=2,
        num_zero_advantage_groups=0,
        lengths=LengthStats(mean=ANSWER, p95=ANSWER, max=ANSWER, cut_off=0.0),
    )
    return BatchRow(
        index=index,
        policy_version=index + 1,
        group_ids=tuple(range(first, first + GROUPS_PER_BATCH)),
        stats=stats,
        samplings=(SAMPLING,) * GROUPS_PER_BATCH,
    )


def _version(index: int) -> VersionRow:
    return VersionRow(
        policy_version=index + 1, endpoint="tcp://a:1", digest="0", num_bytes=1, trained_batches=index, vocabulary=264
    )


def _group(group_id: int) -> GroupRow:
    return GroupRow(
        group_id=group_id,
        split="train",
        prompt=group_id,
        task_index=group_id % NUM_TASKS,
        evaluation=None,
        status="batched",
        sampling=SAMPLING,
        batch=group_id // GROUPS_PER_BATCH,
    )


def _held_out(first: int, evaluation: int, task: int) -> GroupRow:
    return GroupRow(
        group_id=first + evaluation * 64 + task,
        split="eval",
        prompt=task,
        task_index=task,
        evaluation=evaluation,
        status="evaluated",
        sampling=SAMPLING,
    )


def _trajectories(first_held_out: int, total: int) -> Iterator[tuple[Any, ...]]:
    table = TABLES[TrajectoryRow]
    places = {name: at for at, name in enumerate(table.fields)}
    row = TrajectoryRow(
        trajectory_id=0,
        group_id=0,
        status="finished",
        epoch=1,
        num_tokens=PROMPT + ANSWER,
        num_action_tokens=ANSWER,
        num_turns=1,
        num_segments=2,
        num_runs=2,
        finish_reason="done",
        turn_rewards=(1.0,),
    )
    values = list(table.values(row)[:-1])
    in_batches = first_held_out * GROUP_SIZE
    for trajectory in range(total):
        group = trajectory // GROUP_SIZE if trajectory < in_batches else first_held_out + trajectory - in_batches
        version = max(1, group // GROUPS_PER_BATCH)
        values[places["trajectory_id"]], values[places["group_id"]] = trajectory, group
        values[places["version_sum"]], values[places["min_version"]] = version * ANSWER, version
        values[places["last_version"]] = version
        values[places["turn_rewards"]] = "[1.0]" if (trajectory * 7919) % 5 < 2 else "[0.0]"
        yield (*values, row_checksum("trajectories", tuple(values)))


def _chunks(total: int) -> Iterator[tuple[Any, ...]]:
    ids = np.arange(PROMPT + ANSWER, dtype="<i4") + 48
    logprobs = np.where(np.arange(PROMPT + ANSWER) < PROMPT, 0, -0.7).astype("<f4")
    chunk = Chunk(
        trajectory_id=0,
        epoch=1,
        offset=0,
        num_tokens=PROMPT + ANSWER,
        segments=[Segment("observation", 0, PROMPT), Segment("action", 0, ANSWER)],
        version_runs=[VersionRun(-1, PROMPT), VersionRun(1, ANSWER)],
        state=None,
        turn_done=True,
        turn_rewards=[1.0],
    )
    stored = stored_chunk(chunk, ids, logprobs, "rollout-0")
    content = (stored.header, stored.token_ids, stored.logprobs)
    for trajectory in range(total):
        place = (trajectory, 0, 1, PROMPT + ANSWER)
        yield (*place, *content, chunk_checksum(place, *content))


def _metrics_lines(num_batches: int, evaluations: list[EvaluationRow]) -> Iterator[tuple[Any, ...]]:
    number = 0
    line: dict[str, Any] = {f"{name}/{bucket}": 0.123456789 for bucket in BUCKETS for name in NAMES}
    for index in range(num_batches):
        number += 1
        curve = 1 - 0.8 / (1 + index / (num_batches / 6))
        line |= {
            "event": "batch",
            "batch": index,
            "policy_version": index + 2,
            "reward_mean": curve + 0.03 * ((index * 7919) % 100 / 100 - 0.5),
            "lag/max": 2,
            "tokens_per_s": 900.0,
            "time": 1.8e9 + 10 * index,
            "time_s": 10.0 * index,
            "num_trajectories": 256,
        }
        yield _line(number, line)
    for row in evaluations:
        number += 1
        held = {"event": "eval", "eval/reward": 0.5, "batch": row.batch, "policy_version": row.policy_version}
        yield _line(number, {**held, "num_finished": 64, "num_failed": 0, "time": 1.8e9 + 10.0 * row.batch})


def _line(number: int, line: dict[str, Any]) -> tuple[Any, ...]:
    values = (number, json.dumps(line))
    return (*values, row_checksum("metrics_lines", values))


if __name__ == "__main__":
    write_big_ledger(Path(sys.argv[1]), int(sys.argv[2]))

"""The comparisons of the broker's benchmarks, and the ledgers that they make."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.broker_intake.__main__ import (
    BROKER,
    BROKER_ALONE,
    BROKER_CURVE,
    ROUTER,
    ROUTER_CURVE,
    SQLITE,
    Rate,
    percentile,
    quartiles,
    ratios,
    table,
)
from benchmarks.broker_intake.load import CHUNKS_PER_TRAJECTORY
from benchmarks.broker_intake.raw import RawStore
from benchmarks.broker_intake.staged_broker import Stages
from benchmarks.trained_ledger import GROUP_SIZE, GROUPS_PER_BATCH, write_ledger
from gspo_services.broker.store.reader import LEDGER_FILE
from gspo_services.broker.store.store import Store
from gspo_services.runs.audit import audit_run


def a_round(sqlite: float, router: float, router_curve: float, broker: float, broker_curve: float) -> dict[str, Rate]:
    """Return chunks per CPU second of each kind."""
    per_cpu_s = {
        SQLITE: sqlite, ROUTER: router, ROUTER_CURVE: router_curve, BROKER: broker, BROKER_CURVE: broker_curve,
        BROKER_ALONE: 1.0,
    }  # fmt: skip
    rates = {kind: Rate(chunks=1000, seconds=2.0, cpu_s=1000 / value) for kind, value in per_cpu_s.items()}
    for kind in (BROKER, BROKER_CURVE, BROKER_ALONE):
        rates[kind].latencies_s = [0.010, 0.020, 0.030]
        rates[kind].alone_s = [0.001]
        rates[kind].commits = 10
    return rates


def test_a_ratio_is_taken_over_the_slower_half_of_its_own_round_and_curve_over_curve() -> None:
    rounds = [a_round(100, 400, 50, 25, 25), a_round(400, 200, 100, 25, 25)]
    assert ratios(rounds, BROKER) == pytest.approx([25 / 100, 25 / 200])
    assert ratios(rounds, BROKER_CURVE) == pytest.approx([25 / 50, 25 / 100])


def test_the_table_says_rates_commits_ratios_and_latencies_of_each_kind() -> None:
    lines = table(64, [a_round(100, 400, 50, 25, 20)])
    assert lines[0] == "| 64 | SQLite alone | 500 | 0.3 | 100 (100 to 100) |  |  |  |  |"
    assert lines[3] == "| 64 | broker | 500 | 0.3 | 25 (25 to 25) | 100 | 0.25 (0.25 to 0.25) | 1.0 / 1.0 | 20.0 / 30.0 |"


def test_a_stage_counts_its_own_time_and_not_that_of_a_stage_inside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 4.0, 9.0])
    monkeypatch.setattr("benchmarks.broker_intake.staged_broker.time.thread_time", lambda: next(times))
    stages = Stages()
    inner = stages.timed("inner", lambda: "done")
    assert stages.timed("outer", inner)() == "done"
    assert stages.seconds == {"inner": 3.0, "outer": 6.0}


def test_every_stage_is_found() -> None:
    with Stages().watching():
        pass


def test_quartiles_and_percentiles_are_values_of_the_rounds() -> None:
    assert quartiles([5.0, 1.0, 3.0, 2.0, 4.0]) == (2.0, 3.0, 4.0)
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0


def test_raw_commits_write_each_chunk_once_and_the_rows_that_a_broker_writes(tmp_path: Path) -> None:
    with closing(RawStore(tmp_path / "raw.sqlite3", chunk_tokens=4)) as store:
        store.write(num_chunks=6, per_commit=4, num_leases=2)
        store.write(num_chunks=2 * CHUNKS_PER_TRAJECTORY + 2, per_commit=100, num_leases=2)
    with sqlite3.connect(tmp_path / "raw.sqlite3") as connection:
        first = connection.execute("SELECT trajectory_id, start FROM chunks ORDER BY rowid LIMIT 6").fetchall()
        (num_chunks,) = connection.execute("SELECT count(*) FROM chunks").fetchone()
        lengths = connection.execute("SELECT num_tokens FROM trajectories ORDER BY trajectory_id").fetchall()
        (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
    connection.close()
    assert first == [(0, 0), (1, 0), (0, 4), (1, 4), (0, 8), (1, 8)]
    assert (num_chunks, mode) == (6 + 2 * CHUNKS_PER_TRAJECTORY + 2, "wal")
    assert lengths == [(4,), (4,), (4 * CHUNKS_PER_TRAJECTORY,), (4 * CHUNKS_PER_TRAJECTORY,), (4,), (4,)]


def test_a_ledger_that_is_made_passes_the_audit_and_leaves_as_many_batches_uncheckpointed_as_told(tmp_path: Path) -> None:
    write_ledger(tmp_path / "run", 2 * GROUP_SIZE * GROUPS_PER_BATCH, fingerprint="own", num_uncheckpointed=1)
    audit = audit_run(tmp_path / "run")
    assert audit.problems == []
    with Store(tmp_path / "run" / LEDGER_FILE, fingerprint="own", run_id="") as store:
        contents = store.contents()
    assert contents.next_batch_checkpointed == 1
    assert [row.index for row in contents.batches][-1] == 1
    assert len(contents.groups) == GROUPS_PER_BATCH

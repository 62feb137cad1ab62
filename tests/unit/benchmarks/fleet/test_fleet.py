"""The benchmark of a fleet: what it needs, what it calls too fast, and a small fleet from its first Hello to the audit."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from benchmarks.fleet.__main__ import faults, parsed
from benchmarks.fleet.figures import FIGURES, draw, growth, table, too_fast
from benchmarks.fleet.limits import objections
from benchmarks.fleet.load import LONGEST, SHORTEST, Load, num_chunks_of
from benchmarks.fleet.measure import Plan, measured, missing


def a_result(rollouts: int, per_chunk_us: float = 100.0) -> dict[str, Any]:
    """Figures of a fleet in which everything is linear."""
    phase = {
        "chunks_per_s": 2.0 * rollouts, "cpu_us_per_chunk": per_chunk_us, "ack_p50_ms": 10.0, "ack_p99_ms": 20.0,
        "lease_p50_ms": 10.0, "lease_p99_ms": 20.0, "rss_mib": 60.0 + rollouts, "threads": 8, "files": 30 + rollouts,
    }  # fmt: skip
    recovery = {"broker_starts_s": 2.0, "recovered_all_s": 0.1 * rollouts, "recovery_cpu_s": 0.01 * rollouts}
    return {
        "rollouts": rollouts,
        "steady": phase,
        "changing": phase,
        "recovery": {**recovery, "working": rollouts},
        "proof": {"ledger_mib": 0.1 * rollouts, "missing": [], "audit_problems": []},
    }


def test_lengths_have_a_heavy_tail_between_their_bounds() -> None:
    lengths = sorted(num_chunks_of(number) for number in range(20_000))
    assert (lengths[0], lengths[-1]) == (SHORTEST, LONGEST)
    assert mean(lengths) > 1.5 * lengths[len(lengths) // 2]
    assert sum(lengths[-2000:]) > 0.35 * sum(lengths), "a tenth of the episodes has more than a third of the chunks"


def test_limits_that_are_too_small_are_named_with_the_way_out() -> None:
    assert objections(100, 2, files_allowed=1024, bytes_available=2**32) == []
    files, memory = objections(1000, 4, files_allowed=1024, bytes_available=2**29)
    assert "1,000 rollouts in 4 processes need 1,346" in files
    assert "ulimit -n 1346" in files
    assert "0.5 GiB are available: use fewer --rollouts" in memory


def test_wrong_options_are_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(["--rollouts", "0"])
    assert "--rollouts from 1" in capsys.readouterr().err


def test_what_grows_per_chunk_is_faster_than_linear_and_what_grows_with_the_fleet_is_not() -> None:
    assert too_fast([a_result(100), a_result(1000)]) == []
    assert too_fast([a_result(100), a_result(1000, per_chunk_us=200.0)]) == [
        f"{name} grows with N^0.30, and N^0 is linear"
        for name in ("broker's CPU per chunk", "CPU per chunk, joins and losses")
    ]
    assert growth([a_result(100)]) == {}


def test_the_table_and_the_plot_have_every_figure(tmp_path: Path) -> None:
    results = [a_result(10), a_result(100)]
    lines = table(results)
    assert lines[0] == "| | 10 | 100 | exponent |"
    assert lines[2] == "| chunks taken, 1/s | 20 | 200 | 1.00 |"
    assert len(lines) == 2 + len(FIGURES)
    draw(results, tmp_path / "fleet.png")
    assert (tmp_path / "fleet.png").stat().st_size > 10_000


def test_what_was_acknowledged_and_is_missing_is_a_fault(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite3")) as ledger:
        ledger.execute("CREATE TABLE trajectories (trajectory_id, epoch, num_tokens, status)")
        rows = [(1, 1, 64, "leased"), (2, 1, 64, "finished"), (3, 2, 64, "leased"), (4, 1, 64, "free")]
        ledger.executemany("INSERT INTO trajectories VALUES (?, ?, ?, ?)", rows)
        # The row of a lease is behind its chunks.
        ledger.execute("CREATE TABLE chunks (trajectory_id, num_tokens)")
        ledger.executemany("INSERT INTO chunks VALUES (?, ?)", [(6, 64), (6, 32)])
        ledger.execute("INSERT INTO trajectories VALUES (6, 1, 64, 'leased')")
        ledger.commit()
    acknowledged = {1: (1, 64), 2: (1, 128), 3: (1, 128), 4: (1, 128), 5: (1, 64), 6: (1, 96)}
    found = missing(tmp_path / "ledger.sqlite3", acknowledged)
    assert found == [
        "trajectory 2: 128 tokens were acknowledged, 64 are in the ledger (finished)",
        "trajectory 5: 64 tokens were acknowledged, 0 are in the ledger (missing)",
    ]
    result = a_result(3)
    result["proof"]["missing"] = found
    result["recovery"]["working"] = 2
    assert faults(result, 5.0) == [*found, "2 of 3 rollouts worked again within 5 s"]


def test_three_rollouts_play_are_lost_join_and_go_on_after_the_broker_is_killed(tmp_path: Path) -> None:
    load = Load(pace=160.0, chunk_tokens=4)
    plan = Plan(rollouts=3, processes=1, load=load, seconds=1.0, lease_s=2.0, recover_s=60.0, churn=0.5)
    result = asyncio.run(measured(tmp_path, plan, lambda text: None))
    assert faults(result, plan.recover_s) == []
    assert result["proof"]["trajectories_checked"] >= 3 * load.episodes
    assert result["batches"] > 0
    assert (result["changing"]["lost"], result["changing"]["left"], result["changing"]["joined"]) == (2, 1, 3)
    assert min(figure.value(result) for figure in FIGURES) > 0

"""A whole run in which every process lives at another hour, some of them years away. ``make test-faults``."""

import os
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.faults.fleet import Fleet
from tests.support.broker.ledger_audit import audit
from tests.support.processes.run_process import REPOSITORY

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]
HOUR_S, YEAR_S = 3600.0, 365.25 * 86_400
BATCHES = 4


def at(shift_s: float) -> dict[str, str]:
    """The environment of a process whose clock is so much ahead."""
    folders = [str(REPOSITORY / "tests/support/shifted_clock"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {"PYTHONPATH": os.pathsep.join(filter(None, folders)), "GSPO_TEST_CLOCK_S": str(shift_s)}


def test_a_run_trains_whatever_hour_each_of_its_processes_believes_it_is(tmp_path: Path) -> None:
    with Fleet(tmp_path, f"run.num_batches={2 * BATCHES}", "learner.checkpoint_every_batches=2") as fleet:
        broker = fleet.start("broker", environment=at(3 * YEAR_S))
        fleet.start("learner", environment=at(-7 * HOUR_S))
        fleet.start("rollout", name="rollout-0", environment=at(-20 * YEAR_S))
        fleet.start("rollout", name="rollout-1", environment=at(26 * HOUR_S))
        fleet.wait_batches(BATCHES)
        # The broker's clock is set back by more than the run's age while it is away.
        broker.environment |= at(-YEAR_S)
        broker.signal(signal.SIGKILL)
        fleet.wait_batches(2 * BATCHES)
        fleet.finish()
        rows = fleet.rows("batch")
        lapsed = fleet.events("broker", "lease_expired")
        started = fleet.events("broker", "broker_started")
    report = audit(tmp_path)
    assert report.problems == []
    assert (report.num_batches, report.dropped) == (2 * BATCHES, {})
    assert [row["batch"] for row in rows] == list(range(2 * BATCHES))
    # The clocks were really those; the run's own seconds do not follow them.
    now = datetime.now(tz=UTC)
    years = [(datetime.fromisoformat(each["timestamp"]) - now) / timedelta(seconds=YEAR_S) for each in started]
    assert [round(each) for each in years] == [3, -1]
    assert rows[BATCHES - 1]["time"] - rows[-1]["time"] > 3 * YEAR_S
    elapsed = [row["time_s"] for row in rows]
    assert elapsed == sorted(elapsed)
    assert elapsed[-1] < HOUR_S
    assert lapsed == []

"""Each process of a run is killed, and the run continues: nothing is lost, nothing trained twice. ``make test-demo``."""

import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from gspo_services.broker.store import reading
from tests.support.broker.ledger_audit import audit
from tests.support.postgres.fixtures import SynchronousDatabase
from tests.support.runs.multi_turn import multi_turn_run

pytestmark = [pytest.mark.demo, pytest.mark.timeout(1500)]
MANY = 8
"""Some of them end between the look and the kill."""


def num_begun(directory: Path, rollout: str) -> int:
    """How many trajectories a rollout has a lease of and acknowledged action tokens in."""
    query = "SELECT count(*) FROM trajectories WHERE status = 'leased' AND holder_peer = ? AND num_action_tokens > 0"
    with reading(directory) as connection:
        return int(connection.execute(query, (rollout,)).fetchone()[0])


def test_killed_rollouts_lose_nothing_and_their_trajectories_continue_elsewhere(tmp_path: Path) -> None:
    with multi_turn_run(tmp_path, "run.num_batches=14") as run:
        run.wait_until("third batch", lambda: len(run.rows("batch")) >= 3, 300)
        agent = psutil.Process(run.pid_of("gspo_services.rollout", "rollout-0"))
        engines = agent.children(recursive=True)
        run.wait_until("tokens to resume from", lambda: num_begun(run.directory, "rollout-0") >= MANY, 300)
        run.kill("gspo_services.rollout", "rollout-0")
        _, alive = psutil.wait_procs(engines, timeout=20)
        assert not alive, "SGLang outlived the rollout that started it"
        run.wait_until("restart of rollout-0", lambda: "process_ended" in run.output.read_text(), 60)
        assert run.wait_finished(900) == 0, run.tail()
    report = audit(tmp_path)
    assert report.problems == []
    assert report.num_batches == 14
    resumed = run.events("rollout-0", "trajectory_resumed") + run.events("rollout-1", "trajectory_resumed")
    assert any(row["num_tokens"] > 0 for row in resumed)
    assert report.num_resumed > 0


def test_a_killed_engine_ends_its_rollout_which_hands_its_trajectories_back(tmp_path: Path) -> None:
    with multi_turn_run(tmp_path, "run.num_batches=8") as run:
        run.wait_until("second batch", lambda: len(run.rows("batch")) >= 2, 300)
        agent = psutil.Process(run.pid_of("gspo_services.rollout", "rollout-1"))
        for engine in agent.children(recursive=True):
            engine.kill()
        assert run.wait_finished(900) == 0, run.tail()
    assert audit(tmp_path).problems == []


def test_a_killed_broker_comes_back_and_the_run_continues(tmp_path: Path) -> None:
    require_that_the_broker_comes_back(tmp_path)


def test_a_killed_broker_with_a_database_and_the_killed_database_come_back_and_the_run_continues(
    tmp_path: Path, postgres: SynchronousDatabase, schema: str
) -> None:
    database = (f"broker.database={postgres.conninfo}", f"broker.database_schema={schema}")
    require_that_the_broker_comes_back(tmp_path, *database, crash=postgres.crash)


def require_that_the_broker_comes_back(tmp_path: Path, *overrides: str, crash: Callable[[], None] = lambda: None) -> None:
    with multi_turn_run(tmp_path, "run.num_batches=12", *overrides) as run:
        run.wait_until("third batch", lambda: len(run.rows("batch")) >= 3, 300)
        run.kill("gspo_services.broker")
        run.wait_until("two more batches", lambda: len(run.rows("batch")) >= 5, 120)
        crash()
        run.wait_until("two more batches", lambda: len(run.rows("batch")) >= 7, 120)
        run.kill("gspo_services.broker")
        assert run.wait_finished(900) == 0, run.tail()
    report = audit(tmp_path)
    assert report.problems == []
    assert report.num_batches == 12
    assert report.dropped == {}
    assert report.num_trained_again == 0


def test_a_killed_learner_resumes_from_its_checkpoint_and_gets_the_same_batches_again(tmp_path: Path) -> None:
    with multi_turn_run(tmp_path, "run.num_batches=12", "learner.checkpoint_every_batches=4") as run:
        run.wait_until("sixth batch", lambda: len(run.rows("batch")) >= 6, 300)
        run.kill("gspo_services.learner")
        assert run.wait_finished(900) == 0, run.tail()
    report = audit(tmp_path)
    assert report.problems == []
    assert report.num_batches == 12
    # Batches 4 and 5 came after the checkpoint: they were trained again, unchanged.
    assert report.num_trained_again >= 1
    resumed = run.events("learner", "resumed")
    assert resumed[-1]["next_batch"] == 4
    again = [row for row in run.rows("batch") if row["again"]]
    assert {row["batch"] for row in again} >= {4}
    for row in again:
        first = next(other for other in run.rows("batch") if other["batch"] == row["batch"])
        assert first["num_tokens"] == row["num_tokens"]
        assert first["reward_mean"] == pytest.approx(row["reward_mean"])
        # The same weights, the same batch: the same loss.
        assert first["loss"] == pytest.approx(row["loss"], abs=1e-5)


def test_ctrl_c_stops_everything_and_the_run_resumes_later(tmp_path: Path) -> None:
    with multi_turn_run(tmp_path, "run.num_batches=10") as run:
        run.wait_until("third batch", lambda: len(run.rows("batch")) >= 3, 300)
        run.process.send_signal(signal.SIGINT)
        run.wait_finished(120)
        assert run.leftovers() == []
    with multi_turn_run(tmp_path, "run.num_batches=10") as again:
        assert again.wait_finished(900) == 0, again.tail()
    assert again.events("learner", "resumed")
    report = audit(tmp_path)
    assert report.problems == []
    assert report.num_batches == 10
    assert report.num_trained_again == 0

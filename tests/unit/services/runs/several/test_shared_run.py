"""A run of several brokers is read as one."""

import json
from pathlib import Path

import pytest

from gspo_services.broker.metrics_file import METRICS_FILE
from gspo_services.broker.store import LEDGER_FILE
from gspo_services.broker.store.lock import LedgerLock
from gspo_services.runs.ledgers import is_held, other_ledgers
from gspo_services.runs.metrics import RunFollower, read_metrics
from gspo_services.runs.opening import open_run
from gspo_services.runs.reading import OpenRun
from gspo_services.runs.scripting.run import TrainingRun
from gspo_services.runs.several import SharedRun
from gspo_services.runs.view.overview import Curves
from tests.support.processes.small_run import write_shared_run, write_small_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shared") / "run"
    write_shared_run(directory, 3)
    return directory


def test_ids_say_whose_ledger_is_read(run: Path, tmp_path: Path) -> None:
    write_small_run(tmp_path / "alone")
    with open_run(run) as shared, open_run(tmp_path / "alone") as alone:
        assert isinstance(shared, SharedRun)
        assert not isinstance(alone, SharedRun)
        groups = list(shared.groups())
        assert [group.group_id for group in groups] == list(range(3 * len(list(alone.groups()))))
        assert [each.trajectory_id for each in shared.trajectories()] == list(range(3 * len(list(alone.trajectories()))))
        assert all(member.trajectory_id % 3 == group.group_id % 3 for group in groups for member in group.members)
        dropped = list(shared.groups(status="dropped", drop_reason="failed"))
        assert [group.group_id for group in dropped] == [0, 1, 2]
        assert list(shared.groups(first=4, end=6)) == groups[4:6]
        for number in range(3):
            trajectory = shared.trajectory(9 + number)
            own = alone.trajectory(3)
            assert trajectory is not None
            assert own is not None
            assert (trajectory.group_id % 3, trajectory.reward) == (number, own.reward)
            assert shared.group(trajectory.group_id) in groups
            assert shared.tokens(9 + number).trajectory_id == 9 + number
            assert len(shared.tokens(9 + number).token_ids_T) == trajectory.num_tokens
            assert len(shared.journal(9 + number)) == len(alone.journal(3))


def test_a_batch_has_the_groups_and_counts_of_all_its_shares(run: Path, tmp_path: Path) -> None:
    write_small_run(tmp_path / "alone")
    with open_run(run) as shared, open_run(tmp_path / "alone") as alone:
        batch, own = shared.batch(1), alone.batch(1)
        assert batch is not None
        assert own is not None
        assert [group_id % 3 for group_id in batch.group_ids] == [0, 0, 1, 1, 2, 2]
        assert [group.group_id for group in shared.groups_of_batch(1)] == list(batch.group_ids)
        assert (batch.stats.num_groups, batch.stats.num_tokens) == (6, 3 * own.stats.num_tokens)
        assert batch.stats.mean_reward == pytest.approx(own.stats.mean_reward)
        assert batch.trained_versions == own.trained_versions
        assert list(shared.batches()) == [shared.batch(index) for index in range(3)]
        assert shared.batch(3) is None
        facts = shared.facts()
        assert (facts.num_batches, facts.num_trained, facts.num_groups) == (3, 3, len(list(shared.groups())))
        assert facts.settings is not None
        assert facts.settings.broker.num_brokers == 3


def test_what_happened_to_one_brokers_share_is_told_too(run: Path) -> None:
    metrics = read_metrics(run)
    assert sum(row["event"] == "dropped" for _, row in metrics.events) == 9
    assert len(metrics.batches) == 3
    rows = list(RunFollower((run, *other_ledgers(run))).rows())
    assert sum(row["event"] == "batch" for row in rows) == 4  # One was trained again.
    assert len(rows) == 4 + 9
    curves = Curves()
    with open_run(run) as shared:
        assert isinstance(shared, OpenRun)
        curves.read(shared.lines(), shared.other_lines())
        curves.read(shared.lines(), shared.other_lines())
    assert curves.dropped == {"failed": 3, "stale": 6}


def test_a_script_sees_one_run_and_that_any_broker_is_alive(run: Path) -> None:
    opened = TrainingRun.open(run)
    assert len(list(opened.groups(status="batched"))) == 18
    assert opened.tokens(5).trajectory_id == 5
    assert not opened.is_live
    lock = LedgerLock(run / "broker-2" / LEDGER_FILE)
    try:
        assert is_held(run)
        assert opened.is_live
    finally:
        lock.release()


def test_lines_of_a_broker_that_is_away_are_left_out(run: Path, tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text((run / "settings.json").read_text())
    (tmp_path / METRICS_FILE).write_text(json.dumps({"event": "dropped", "line": 1, "reason": "stale"}) + "\n")
    assert [batch for batch, _ in read_metrics(tmp_path).events] == [0]

"""An audit knows groups that wait to be graded, and finds a group in a batch that never was."""

import shutil
import sqlite3
from pathlib import Path

import pytest

from gspo_protocol.messages import Graded
from gspo_services.broker.metrics_file import METRICS_FILE, MetricsFile
from gspo_services.broker.store.reader import LEDGER_FILE
from gspo_services.runs.audit import audit_run
from gspo_services.runs.reading import open_run
from gspo_services.shared.settings import write_run_settings
from gspo_services.shared.settings.configuration import load_settings
from tests.support.broker.ledger import LEARNER, LedgerHarness, config_with
from tests.support.broker.ledger_training import R1, generate


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A batch of group 0; of group 1 both episodes have ended; of group 2 one."""
    directory = tmp_path_factory.mktemp("graded") / "run"
    directory.mkdir()
    world = LedgerHarness(config_with(grades_groups=True, groups_per_batch=1, max_lag=2), path=directory / LEDGER_FILE)
    world.hello(LEARNER, "learner")
    world.hello(R1)
    world.publish(1, 0)
    generate(world, 2, 1, 0.5)
    (lease,) = world.lease(R1)
    rewards = Graded(trajectory_id=lease.trajectory_id, epoch=lease.epoch, rewards=[1.0, 3.0], components=[{}, {}])
    world.send(R1, rewards)
    world.request_batch(0, 1)
    generate(world, 2, 1)
    (lease,) = world.lease(R1)
    first, _ = world.lease(R1, 2)
    world.episode(R1, first, 1)
    MetricsFile(directory / METRICS_FILE).append(world.store.metrics_after(0))
    world.store.close()
    return directory


def with_settings(run: Path, copy: Path, group: str) -> Path:
    """A copy of the run, with its settings."""
    directory = Path(shutil.copytree(run, copy))
    overrides = (
        f"run.directory={directory}", "model.path=/models/tiny", "batch.group_size=2", "batch.groups_per_batch=1",
        "batch.max_lag=2", "batch.mini_batches=1", f"reward.group={group}",
    )  # fmt: skip
    write_run_settings(load_settings(None, overrides, {}))
    return directory


def test_groups_that_wait_for_their_grade_are_as_they_should_be(small_run: Path, tmp_path: Path) -> None:
    run = with_settings(small_run, tmp_path / "run", "my_rewards:rank")
    audit = audit_run(run)
    assert audit.problems == []
    with open_run(run) as opened:
        found = [[(each.status, each.reward) for each in group.members] for group in opened.groups()]
    assert found == [
        [("finished", 1.0), ("finished", 3.0)],
        [("ended", None), ("leased", None)],
        [("ended", None), ("leased", None)],
    ]


def test_a_run_that_grades_nothing_has_no_such_trajectories(small_run: Path, tmp_path: Path) -> None:
    findings = audit_run(with_settings(small_run, tmp_path / "run", "")).findings
    assert set(findings.counts) == {"trajectory without an end"}
    assert findings.counts["trajectory without an end"] == 3


def test_a_group_in_a_batch_that_was_never_graded_is_named(small_run: Path, tmp_path: Path) -> None:
    run = with_settings(small_run, tmp_path / "run", "my_rewards:rank")
    connection = sqlite3.connect(run / LEDGER_FILE)
    connection.execute("UPDATE trajectories SET status = 'ended' WHERE trajectory_id = 0")
    connection.commit()
    connection.close()
    problems = "\n".join(audit_run(run).problems)
    assert "group 0 is batched, but only 1 of its 2 trajectories are finished" in problems
    assert "trajectory 0 is ended and in batch 0" in problems

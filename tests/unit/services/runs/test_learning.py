"""What the ledger of a run adds to the watch over learning."""

from pathlib import Path

import pytest

from gspo_services.broker.metrics_file import METRICS_FILE, MetricsFile
from gspo_services.broker.store import LEDGER_FILE
from gspo_services.runs.learning import compared_tasks, outcome_of, shown_answers
from gspo_services.runs.metrics import read_metrics
from gspo_services.runs.reading import open_run
from gspo_services.shared.settings import Settings, override_settings, read_run_settings, write_run_settings
from tests.support.broker.ledger import LEARNER, LedgerHarness, config_with
from tests.support.broker.ledger_training import R1, generate
from tests.support.processes.evaluated_run import write_evaluated_run


def write_trained_run(directory: Path) -> None:
    """One batch between two evaluations of three tasks, the second of which is solved only afterwards."""
    write_evaluated_run(directory.parent / "other")
    world = LedgerHarness(config_with(evaluate_every_batches=1, num_eval_tasks=3), path=directory / LEDGER_FILE)
    overrides = [f"run.directory={directory}", f"model.path={directory.parent / 'other' / 'model'}"]
    write_run_settings(override_settings(Settings(), overrides))
    world.hello(LEARNER, "learner")
    world.hello(R1)
    world.publish(1, 0)
    for rewards, version in (((0.0, 0.0, 1.0), 1), ((0.0, 1.0, 1.0), 2)):
        for reward, lease in zip(rewards, world.lease(R1, 3, version), strict=True):
            assert lease.split == "eval"
            world.episode(R1, lease, version, reward)
        if version == 1:
            generate(world, 4, 1, 0.25)
            world.request_batch(0, 1)
            world.trained(0, 1)
            world.publish(2, 1)
    MetricsFile(directory / METRICS_FILE).append(world.store.metrics_after(0))
    world.store.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    directory.mkdir()
    write_trained_run(directory)
    return directory


def test_the_same_tasks_of_two_evaluations_are_found_in_the_ledger(run: Path) -> None:
    watch = read_metrics(run).learning
    with open_run(run) as opened:
        assert compared_tasks(opened, watch) == ({0: 0.0, 1: 0.0, 2: 1.0}, {0: 0.0, 1: 1.0, 2: 1.0})
    assert "0.333 -> 0.667" in outcome_of(run, watch).text
    assert "3 tasks, each compared with itself" in outcome_of(run, watch).text
    assert outcome_of(run / "gone", watch) == watch.outcome()
    assert "3 answers" in watch.outcome().text


def test_answers_of_the_newest_batch_come_with_what_was_expected(run: Path) -> None:
    settings = read_run_settings(run)
    found = shown_answers(run, settings)
    with open_run(run) as opened:
        groups = opened.groups_of_batch(0)
    assert [each.trajectory_id for each in found] == [group.members[0].trajectory_id for group in groups]
    assert all(each.prompt and each.answer and "+" in each.expected for each in found)
    assert f"expected {found[0].expected}: reward 0.25" in str(found[0])
    assert shown_answers(run / "gone", settings) == []
    assert shown_answers(run, override_settings(settings, ["model.path=gone"])) == []
    own = override_settings(settings, ["environment.name=mine.sums:Sums"])
    assert [each.expected for each in shown_answers(run, own)] == ["", ""], "no code of a user runs for it"

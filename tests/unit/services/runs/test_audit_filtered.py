"""An audit knows the groups that dynamic sampling filtered out, and what may be wrong with them."""

import shutil
import sqlite3
from pathlib import Path

import pytest

from gspo_services.broker.ledger import SamplingRules
from gspo_services.broker.metrics_file import METRICS_FILE, MetricsFile
from gspo_services.broker.store.reader import LEDGER_FILE
from gspo_services.runs.audit import audit_run
from tests.support.broker.ledger import LEARNER, LedgerHarness, config_with
from tests.support.broker.ledger_training import R1, generate


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One batch; one group was filtered out for it and one after it, and a third is complete: the limit is 1."""
    directory = tmp_path_factory.mktemp("left-out") / "run"
    directory.mkdir()
    world = LedgerHarness(config_with(sampling=SamplingRules(max_filtered=1)), path=directory / LEDGER_FILE)
    world.hello(LEARNER, "learner")
    world.hello(R1)
    world.publish(1, 0)
    generate(world, 6, 1)
    world.request_batch(0, 1)
    world.publish(2, 1)
    world.trained(0, 2)
    generate(world, 4, 2)
    MetricsFile(directory / METRICS_FILE).append(world.store.metrics_after(0))
    world.store.close()
    return directory


def test_what_is_filtered_out_is_accounted_for(small_run: Path) -> None:
    audit = audit_run(small_run)
    assert audit.problems == []
    assert audit.filtered == 2
    assert audit.dropped == {}
    (outcome,) = [outcome for outcome in audit.outcomes if outcome.status == "filtered"]
    assert (outcome.split, outcome.groups, outcome.trajectories, outcome.tokens) == ("train", 2, 4, 12)


@pytest.mark.parametrize(
    ("statement", "name", "words"),
    [
        (
            "UPDATE trajectories SET turn_rewards = '[0.5]' WHERE trajectory_id = 0",
            "filtered out without a reason",
            "group 0 is filtered out, and has an advantage: its rewards go from 0.5 to 1",
        ),
        ("UPDATE groups SET batch = 0 WHERE group_id = 0", "filtered out without a reason", "of split train and of batch 0"),
        ("DELETE FROM metrics_lines WHERE number = 1", "no metrics line", "group 0 was filtered out"),
        (
            "UPDATE batches SET stats = json_set(stats, '$.num_filtered_groups', 3)",
            "no metrics line",
            "counted 4 groups that were filtered out while they filled, 2 are recorded",
        ),
        (
            "UPDATE trajectories SET status = 'free' WHERE trajectory_id = 0",
            "group not whole",
            "group 0 is filtered, but only 1 of",
        ),
    ],
)
def test_a_planted_corruption_is_named(small_run: Path, tmp_path: Path, statement: str, name: str, words: str) -> None:
    run = Path(shutil.copytree(small_run, tmp_path / "run"))
    connection = sqlite3.connect(run / LEDGER_FILE)
    connection.execute(statement)
    connection.commit()
    connection.close()
    texts = audit_run(run).findings.texts
    assert any(words in text for text in texts.get(name, [])), texts

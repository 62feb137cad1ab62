"""The ledgers of several brokers are audited as one run."""

import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from gspo_services.broker.store import LEDGER_FILE, NoLedger
from gspo_services.cli.accept_loss import accept_loss_command
from gspo_services.runs.audit.findings import Findings
from gspo_services.runs.opening import audit_run
from gspo_services.runs.several.across import SharedHistory, audit_across
from tests.support.processes.small_run import write_shared_run


@pytest.fixture(scope="module")
def shared_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("across") / "run"
    write_shared_run(directory, 3)
    return directory


@pytest.fixture
def run(shared_run: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(shared_run, tmp_path / "run"))


def test_the_brokers_of_a_run_are_one_run_and_each_is_shown(shared_run: Path) -> None:
    audit = audit_run(shared_run)
    assert audit.problems == []
    assert audit.notes == []
    # Each has what the run of one broker has.
    assert (audit.num_batches, audit.num_trained_batches, audit.num_trained_again) == (3, 3, 1)
    assert audit.num_trained_trajectories == 36
    assert audit.dropped == {"failed": 3, "stale": 6}
    assert [each.num_trained_trajectories for each in audit.brokers] == [12, 12, 12]
    assert len(audit.as_plain()["brokers"]) == 3


SPOILED = {
    "versions differ": [
        ("UPDATE versions SET digest = 'x' WHERE policy_version = 2", "version 2 is not the same everywhere"),
        ("DELETE FROM versions WHERE policy_version = 2", "version 2 is unknown to broker-1"),
    ],
    "trainings differ": [
        ("DELETE FROM trained WHERE batch = 0", "batch 0 was trained into version 2, but broker-1 does not say so"),
        ("DELETE FROM trained WHERE batch = 1 AND policy_version = 4", "batch 1 was trained into version 4"),
    ],
    "share missing": [
        ("DELETE FROM batches WHERE batch = 1", "batch 1 has no share from broker-1, although a later batch exists"),
        ("DELETE FROM batches WHERE batch = 2", "batch 2 was trained, but has no share from broker-1"),
    ],
    "share of another broker": [
        ("UPDATE groups SET group_id = 3 WHERE group_id = 4", "group 3 belongs to broker"),
        ("UPDATE groups SET prompt = 3 WHERE prompt = 4", "prompt 3 belongs to broker"),
        ("UPDATE groups SET task_index = 5 WHERE task_index = 4", "task 5 belongs to broker-2"),
        ("UPDATE trajectories SET trajectory_id = 5 WHERE trajectory_id = 4", "trajectory 5 belongs to broker-2"),
    ],
    "brokers of different runs": [
        ("UPDATE meta SET value = 'other' WHERE key = 'fingerprint'", "broker-1 has other settings than broker 0"),
    ],
    "prompt skipped": [("DELETE FROM groups WHERE prompt = 7", "broker-1: prompt 7 is in no group; the next is prompt 10")],
}


@pytest.mark.parametrize(("name", "statement", "words"), [(name, *each) for name, of in SPOILED.items() for each in of])
def test_what_is_wrong_between_brokers_is_named(name: str, statement: str, words: str, run: Path) -> None:
    connection = sqlite3.connect(run / "broker-1" / LEDGER_FILE)
    connection.execute("PRAGMA foreign_keys = OFF")
    connection.execute(statement)
    connection.commit()
    connection.close()
    assert any(words in text for text in audit_run(run).findings.texts.get(name, ())), audit_run(run).findings.texts


def test_a_broker_that_was_away_need_not_know_a_version_in_whose_place_the_learner_made_another(run: Path) -> None:
    # The run's learner trained batch 1 into version 3, came back, and trained it again into version 4.
    connection = sqlite3.connect(run / "broker-1" / LEDGER_FILE)
    connection.execute("DELETE FROM trained WHERE batch = 1 AND policy_version = 3")
    connection.execute("DELETE FROM versions WHERE policy_version = 3")
    connection.commit()
    connection.close()
    found = audit_run(run).findings.counts
    assert (found["versions differ"], found["trainings differ"]) == (0, 0)


def share(versions: dict[int, tuple[int, str]], trained: set[tuple[int, int]]) -> SharedHistory:
    """Of a run of four trained batches."""
    return SharedHistory(
        fingerprint="f",
        batches=frozenset(range(4)),
        versions=versions,
        trained=frozenset(trained),
        checkpointed=4,
        additions={},
    )


def test_a_broker_that_was_ahead_need_not_know_what_the_learner_made_on_its_way_back() -> None:
    # One broker alone had heard of version 3, of two batches, when the learner came back and trained the first batch anew.
    rest = {6: (3, "f"), 7: (4, "g")}
    late = {(1, 5), (2, 6), (3, 7)}
    behind = share({1: (0, "a"), 2: (1, "b"), 4: (1, "d"), 5: (2, "e"), **rest}, {(0, 2), (0, 4), *late})
    ahead = share({1: (0, "a"), 2: (1, "b"), 3: (2, "c"), 5: (2, "e"), **rest}, {(0, 2), (1, 3), (0, 0), *late})
    findings = Findings()
    audit_across(findings, [behind, ahead])
    assert findings.texts == {}
    # What it was not ahead of it must know.
    audit_across(findings, [behind, replace(ahead, versions={1: (0, "a"), 2: (1, "b"), 5: (2, "e"), **rest})])
    assert findings.texts["versions differ"] == ["version 4 is unknown to broker-1"]


def test_the_newest_batch_may_lack_a_share(run: Path) -> None:
    for each in (run, run / "broker-1", run / "broker-2"):
        connection = sqlite3.connect(each / LEDGER_FILE)
        connection.execute("DELETE FROM trained WHERE batch = 2")
        if each.name == "broker-1":
            connection.execute("DELETE FROM batches WHERE batch = 2")
        connection.commit()
        connection.close()
    audit = audit_run(run)
    assert "batch 2 is under way: it has no share from broker-1 yet" in audit.notes
    assert "share missing" not in audit.findings.counts


def test_a_ledger_that_cannot_be_read_is_named_and_the_others_are_audited(run: Path) -> None:
    (run / "broker-1" / LEDGER_FILE).write_bytes(b"not a database at all")
    audit = audit_run(run)
    assert any("broker-1 cannot be read" in note for note in audit.notes)
    assert audit.findings.texts["database damaged"][0].startswith("broker-1: ")


def test_a_directory_that_is_missing_is_named(run: Path) -> None:
    shutil.rmtree(run / "broker-2")
    with pytest.raises(NoLedger, match=r"broker-2 does not exist, but 3 brokers share this run.*copy its directory here"):
        audit_run(run)


def test_the_directory_of_one_of_several_brokers_is_no_run(run: Path) -> None:
    with pytest.raises(NoLedger, match=r"ledger of broker 1 of 3.*name the directory above it"):
        audit_run(run / "broker-1")


def test_a_loss_of_one_broker_is_not_accepted(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert accept_loss_command(run) == 1
    assert "3 brokers share this run" in capsys.readouterr().err


def test_added_tasks_are_the_same_everywhere_or_still_on_their_way() -> None:
    first, other = ("", 3, 2, "d1"), ("", 3, 2, "d2")
    none = share({1: (0, "a")}, set())
    findings = Findings()
    assert audit_across(findings, [replace(none, additions={1: first}), replace(none, additions={1: first})]) == []
    (note,) = audit_across(findings, [replace(none, additions={1: first}), none])
    assert note.startswith("added tasks 1 are unknown to broker-1: `gspo data add`")
    assert findings.texts == {}
    audit_across(findings, [replace(none, additions={1: first}), replace(none, additions={1: other})])
    assert "addition 1 is not the same everywhere: broker: 2 tasks from 3" in findings.texts["added tasks differ"][0]

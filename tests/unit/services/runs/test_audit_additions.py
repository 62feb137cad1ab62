"""An audit compares the files of added tasks with the ledger, and a backup copies them."""

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from gspo_services.broker.ledger import AddedTasks, SourceShare
from gspo_services.broker.metrics_file import METRICS_FILE, MetricsFile
from gspo_services.broker.rows import ADDED_DIRECTORY
from gspo_services.broker.store import LEDGER_FILE, file_digest
from gspo_services.runs.audit import audit_run
from gspo_services.runs.backup import back_up
from gspo_services.shared.settings.run_settings import write_run_settings
from gspo_services.shared.settings.sections import Run, Settings
from tests.support.broker.ledger import LEARNER, LedgerHarness, config_with
from tests.support.broker.ledger_training import R1


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of three tasks with two additions; no group is complete."""
    directory = tmp_path / "run"
    directory.mkdir()
    config = config_with(sources=(SourceShare(name="first", weight=1.0, num_tasks=3),))
    world = LedgerHarness(config, path=directory / LEDGER_FILE)
    (directory / ADDED_DIRECTORY).mkdir(parents=True)
    for number, first_task in ((1, 3), (2, 5)):
        path = directory / ADDED_DIRECTORY / f"{number}.jsonl"
        path.write_text(str(number))
        added = AddedTasks(source="first", name=path.name, digest=file_digest(path), first_task=first_task, num_tasks=2)
        world._carry_out(world.ledger.on_tasks_added(added), {})
    world.hello(LEARNER, "learner")
    world.hello(R1)
    world.publish(1, 0)
    world.lease(R1, 8)
    MetricsFile(directory / METRICS_FILE).append(world.store.metrics_after(0))
    world.store.close()
    write_run_settings(Settings(run=Run(directory=directory)))
    return directory


def by_sql(statement: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        connection = sqlite3.connect(run / LEDGER_FILE)
        connection.execute(statement)
        connection.commit()
        connection.close()

    return damage


def a_changed_file(run: Path) -> None:
    (run / ADDED_DIRECTORY / "1.jsonl").write_text("other")


def a_missing_file(run: Path) -> None:
    (run / ADDED_DIRECTORY / "2.jsonl").unlink()


def test_additions_that_are_as_they_were_are_in_order(run: Path) -> None:
    findings = audit_run(run).findings.texts
    assert not {"added tasks missing", "task of no file", "no metrics line"} & set(findings), findings


@pytest.mark.parametrize(
    ("damage", "name", "words"),
    [
        (a_changed_file, "added tasks missing", "addition 1 (1.jsonl): "),
        (a_missing_file, "added tasks missing", "addition 2 (2.jsonl): "),
        (by_sql("DELETE FROM additions WHERE number = 1"), "added tasks missing", "addition 2 (2.jsonl) begins at task 5"),
        (
            by_sql("UPDATE groups SET task_index = 7 WHERE group_id = 0"),
            "task of no file",
            "group 0 has task 7, but there are only 7",
        ),
        (by_sql("DELETE FROM metrics_lines WHERE line LIKE '%data_added%'"), "no metrics line", "addition 1 of tasks"),
    ],
)
def test_what_is_wrong_with_additions_is_named(run: Path, damage: Callable[[Path], None], name: str, words: str) -> None:
    damage(run)
    texts = audit_run(run).findings.texts
    assert any(words in text for text in texts.get(name, [])), texts


def test_a_backup_has_what_was_added(run: Path) -> None:
    backup, manifest = back_up(run, run.parent / "backups", lambda _: None)
    assert (backup / ADDED_DIRECTORY / "2.jsonl").read_text() == "2"
    assert f"{ADDED_DIRECTORY}/1.jsonl" in manifest.files

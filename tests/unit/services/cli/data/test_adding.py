"""``gspo data add`` gives a file to the broker of a run, once."""

from pathlib import Path

import pytest

from gspo_services.broker.ledger import SourceShare
from gspo_services.broker.refresh import INCOMING, Refresh, read_additions
from gspo_services.broker.rows import AdditionRow
from gspo_services.broker.store import LEDGER_FILE
from gspo_services.cli.data import data_command
from gspo_services.shared.settings import override_settings
from gspo_services.shared.settings.run_settings import write_run_settings
from gspo_services.shared.settings.sections import Settings
from gspo_services.tasks.environments import MixedTasks, create_task_set
from tests.support.broker.ledger import LedgerHarness, config_with
from tests.support.files.written import written


class StoppedRun:
    """A run that reads one file, and whose broker does not run. ``take`` does what a broker does when it starts."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "run"
        self.directory.mkdir()
        self._options = {"train_path": str(written(directory / "train.jsonl", 0, 1, 2, 3)), "answer_marker": ""}
        options = [f'environment.options.{name}="{value}"' for name, value in self._options.items()]
        self._ledger().store.close()
        write_run_settings(
            override_settings(Settings(), [f"run.directory={self.directory}", "environment.name=dataset", *options])
        )

    def _ledger(self) -> LedgerHarness:
        sources = (SourceShare(name=self._tasks().parts[0].name, weight=1.0, num_tasks=4),)
        return LedgerHarness(config_with(sources=sources), path=self.directory / LEDGER_FILE)

    def _tasks(self) -> MixedTasks:
        tasks = create_task_set("dataset", self._options).tasks("train")
        assert isinstance(tasks, MixedTasks)
        return tasks

    def take(self) -> None:
        """The broker takes what waits for it."""
        ledger = self._ledger()
        tasks, additions = self._tasks(), ledger.store.contents().additions
        read_additions(self.directory, tasks, additions)
        refresh = Refresh(self.directory, tasks, additions)
        for path in self.incoming():
            added = refresh._add(path)
            if added is not None:
                ledger._carry_out(ledger.ledger.on_tasks_added(added), {})
                path.unlink()
        ledger.store.close()

    def incoming(self) -> list[Path]:
        return sorted(path for path in (self.directory / INCOMING).glob("*") if path.is_file())

    def additions(self) -> list[AdditionRow]:
        ledger = self._ledger()
        found = ledger.store.contents().additions
        ledger.store.close()
        return list(found)


def test_the_broker_gets_the_file_and_the_second_delivery_adds_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = StoppedRun(tmp_path)
    add = ["add", str(run.directory), str(written(tmp_path / "more.jsonl", 10, 11)), "--wait", "0"]
    for _ in range(2):
        assert data_command(add) == 0
        assert len(run.incoming()) == 1
    other = written(tmp_path / "elsewhere" / "more.jsonl", 12)
    with pytest.raises(ValueError, match=r"more.jsonl is another file, on its way: start the broker"):
        data_command(["add", str(run.directory), str(other), "--wait", "0"])
    run.take()
    assert data_command(add) == 0
    assert "added before, as addition 1" in capsys.readouterr().out
    assert run.incoming() == []
    assert [(row.number, row.first_task, row.num_tasks) for row in run.additions()] == [(1, 4, 2)]

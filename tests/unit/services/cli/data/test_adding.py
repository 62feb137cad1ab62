"""``gspo data add`` gives a file to every broker of a run, once, and in one order."""

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


class SharedTasks:
    """A run of two brokers that read one file; neither runs. ``take`` does what a broker does when it starts."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "run"
        self._options = {"train_path": str(written(directory / "train.jsonl", 0, 1, 2, 3)), "answer_marker": ""}
        options = [f'environment.options.{name}="{value}"' for name, value in self._options.items()]
        for number in range(2):
            own = [f"run.directory={self.directory}", "broker.num_brokers=2", f"broker.number={number}"]
            settings = override_settings(Settings(), [*own, "environment.name=dataset", *options])
            settings.ledger_directory.mkdir(parents=True)
            self._ledger(number).store.close()
            write_run_settings(settings)

    def ledger_directory(self, number: int) -> Path:
        return self.directory / f"broker-{number}" if number else self.directory

    def _ledger(self, number: int) -> LedgerHarness:
        sources = (SourceShare(name=self._tasks().parts[0].name, weight=1.0, num_tasks=4),)
        config = config_with(sources=sources, num_brokers=2, broker=number)
        return LedgerHarness(config, path=self.ledger_directory(number) / LEDGER_FILE)

    def _tasks(self) -> MixedTasks:
        tasks = create_task_set("dataset", self._options).tasks("train")
        assert isinstance(tasks, MixedTasks)
        return tasks

    def take(self, number: int) -> None:
        """The broker takes what waits for it."""
        ledger, directory = self._ledger(number), self.ledger_directory(number)
        tasks, additions = self._tasks(), ledger.store.contents().additions
        read_additions(directory, tasks, additions)
        refresh = Refresh(directory, tasks, additions)
        for path in self.incoming(number):
            added = refresh._add(path)
            if added is not None:
                ledger._carry_out(ledger.ledger.on_tasks_added(added), {})
                path.unlink()
        ledger.store.close()

    def incoming(self, number: int) -> list[Path]:
        return sorted(path for path in (self.ledger_directory(number) / INCOMING).glob("*") if path.is_file())

    def additions(self, number: int) -> list[AdditionRow]:
        ledger = self._ledger(number)
        found = ledger.store.contents().additions
        ledger.store.close()
        return list(found)


@pytest.fixture
def run(tmp_path: Path) -> SharedTasks:
    return SharedTasks(tmp_path)


def add(run: SharedTasks, path: Path) -> int:
    return data_command(["add", str(run.directory), str(path), "--wait", "0"])


def test_every_broker_gets_the_file_and_the_second_delivery_adds_nothing(
    run: SharedTasks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = written(tmp_path / "more.jsonl", 10, 11)
    assert add(run, more) == 0
    assert [len(run.incoming(number)) for number in range(2)] == [1, 1]
    assert add(run, more) == 0
    assert [len(run.incoming(number)) for number in range(2)] == [1, 1]
    for number in range(2):
        run.take(number)
    assert add(run, more) == 0
    assert "added before, as addition 1" in capsys.readouterr().out
    assert [len(run.additions(number)) for number in range(2)] == [1, 1]
    assert run.incoming(0) == []


def test_a_second_try_gives_the_file_to_the_broker_that_a_killed_one_did_not_reach(run: SharedTasks, tmp_path: Path) -> None:
    more = written(tmp_path / "more.jsonl", 10, 11)
    assert add(run, more) == 0
    run.take(0)
    run.incoming(1)[0].unlink()  # It was killed between the two.
    with pytest.raises(ValueError, match=r"addition 1 .*more.jsonl. is not in .*broker-1 yet.*add that file again first"):
        add(run, written(tmp_path / "others.jsonl", 20))
    assert add(run, more) == 0
    assert run.incoming(0) == []
    run.take(1)
    assert [run.additions(number)[0].digest for number in range(2)] == [run.additions(0)[0].digest] * 2
    assert [run.additions(number)[0].first_task for number in range(2)] == [4, 4]


def test_two_files_at_once_are_refused_because_brokers_could_take_them_in_different_orders(
    run: SharedTasks, tmp_path: Path
) -> None:
    assert add(run, written(tmp_path / "b.jsonl", 10)) == 0
    with pytest.raises(ValueError, match=r"b.jsonl is waiting.*wait until its broker runs and takes it"):
        add(run, written(tmp_path / "a.jsonl", 20))
    assert [len(run.incoming(number)) for number in range(2)] == [1, 1]

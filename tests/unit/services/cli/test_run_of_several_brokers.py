"""A run of several brokers, which gspo 0.1.0 could make, is refused by name by whatever opens a run."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gspo_services.broker.entry import run_broker
from gspo_services.broker.store import OtherSchema, reading
from gspo_services.cli.main import main
from gspo_services.runs.eval.models import scored_models
from gspo_services.runs.export.__main__ import export_command
from gspo_services.runs.reading import open_run
from gspo_services.runs.replay.__main__ import replay_command
from gspo_services.runs.scripting.run import TrainingRun
from gspo_services.runs.track.command import _settings as track_settings
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import SETTINGS_FILE, Settings, read_run_settings, several_brokers_in
from gspo_services.shared.settings.sections import Run
from tests.support.processes.small_run import write_small_run


def change_settings(directory: Path, **broker: object) -> None:
    path = directory / SETTINGS_FILE
    plain = json.loads(path.read_text(encoding="utf-8"))
    plain["broker"] |= broker
    path.write_text(json.dumps(plain), encoding="utf-8")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of broker 0 of two."""
    directory = tmp_path / "run"
    write_small_run(directory)
    change_settings(directory, num_brokers=2, number=0)
    return directory


def test_one_broker_of_before_is_read_and_several_are_named_however_they_are_found(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_small_run(run)
    assert several_brokers_in(run) == ""
    change_settings(run, num_brokers=1, number=0)  # As gspo 0.1.0 wrote it for one broker.
    assert several_brokers_in(run) == ""
    assert read_run_settings(run).run.directory == run
    change_settings(run, num_brokers=3, number=2)
    assert "gspo 0.1.0 reads it" in several_brokers_in(run)
    (run / SETTINGS_FILE).write_text("{")
    assert several_brokers_in(run) == ""
    (run / "broker-1").mkdir()
    (run / "broker-1" / SETTINGS_FILE).write_text("{}")
    assert "gspo 0.1.0 reads it" in several_brokers_in(run)


def test_its_ledger_and_its_settings_are_not_read(run: Path) -> None:
    with pytest.raises(OtherSchema, match="run of several brokers"), reading(run):
        pass
    with pytest.raises(OtherSchema, match="run of several brokers"), open_run(run):
        pass
    with pytest.raises(ConfigurationError, match="run of several brokers"):
        read_run_settings(run)


def files(run: Path) -> list[Path]:
    """All but SQLite's own, which come and go with readers."""
    return [path for path in sorted(run.rglob("*")) if not path.name.endswith(("-shm", "-wal"))]


COMMANDS: dict[str, Callable[[Path], Any]] = {
    "audit": lambda run: main(["audit", str(run)]),
    "plot": lambda run: main(["plot", str(run)]),
    "compare": lambda run: main(["compare", str(run), str(run.parent)]),
    "doctor": lambda run: main(["doctor", str(run)]),
    "stop": lambda run: main(["stop", str(run)]),
    "requeue": lambda run: main(["requeue", str(run)]),
    "data add": lambda run: main(["data", "add", str(run), str(run / SETTINGS_FILE)]),
    "backup": lambda run: main(["backup", str(run), str(run.parent / "backups")]),
    "accept-loss": lambda run: main(["accept-loss", str(run)]),
    "track": lambda run: track_settings(run, []),
    "export": lambda run: export_command([str(run), "--to", str(run.parent / "export")]),
    "replay": lambda run: replay_command([str(run)]),
    "eval": lambda run: scored_models(Settings(run=Run(directory=run)), [], ["all"]),
    "run": lambda run: asyncio.run(run_broker(Settings(run=Run(directory=run)), asyncio.Event())),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_refuses_it_by_name_and_writes_nothing(
    command: str, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # It would hold for all tests behind this one, some of which read what is logged.
    for name in ("stop", "requeue", "doctor.command"):
        monkeypatch.setattr(f"gspo_services.cli.{name}.configure_logging", lambda *_, **__: None)
    before = files(run)
    try:
        status, text = COMMANDS[command](run), capsys.readouterr().err
    except ConfigurationError as error:
        status, text = 2, str(error)
    assert status == 2
    assert "run of several brokers" in text
    assert "gspo 0.1.0" in text
    assert files(run) == before


def test_a_script_that_reads_it_is_told(run: Path) -> None:
    opened = TrainingRun.open(run)
    for read in (opened.metrics, lambda: list(opened.groups()), lambda: opened.settings):
        with pytest.raises((ConfigurationError, OtherSchema), match="run of several brokers"):
            read()

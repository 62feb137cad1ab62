"""Commands that are ended amid their work: no half of it counts, nothing is left behind, and the same command goes on."""

import signal
from pathlib import Path

import pytest

from gspo_services.cli.main import main
from gspo_services.runs.backup.manifest import list_backups
from gspo_services.shared.runtime.errors import EXIT_INTERRUPTED
from tests.support.processes.small_run import write_small_run
from tests.support.processes.standing import MAIN, standing

pytestmark = pytest.mark.faults
PATIENCE_S = 60.0
ENDS = {signal.SIGTERM: EXIT_INTERRUPTED, signal.SIGKILL: -signal.SIGKILL}


def ended(place: str, number: int, end: signal.Signals, *words: str, entry: str = MAIN) -> None:
    """End the command ``words`` after the ``number``-th call of ``place``."""
    with standing(place, number, *words, entry=entry) as process:
        process.send_signal(end)
        assert process.wait(PATIENCE_S) == ENDS[end]


def test_a_backup_that_is_ended_is_none_and_the_next_one_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    run, backups = tmp_path / "run", tmp_path / "backups"
    write_small_run(run)
    for end in (signal.SIGTERM, signal.SIGKILL):
        ended("gspo_services.runs.backup.backup:copy_and_digest", 2, end, "backup", str(run), str(backups))
        assert list_backups(backups) == []
        assert main(["restore", str(backups), str(tmp_path / "again")]) == 2
        if end is signal.SIGTERM:
            assert (list(backups.iterdir()), list(run.glob(".*"))) == ([], [])
    assert main(["backup", str(run), str(backups)]) == 0
    assert [path for path, _ in list_backups(backups)] == list(backups.iterdir())
    assert list(run.glob(".*")) == []


@pytest.mark.parametrize("place", ["ForeignTree.copy", "rewrite_ledger"])
def test_a_restored_run_is_there_whole_or_not_at_all(place: str, tmp_path: Path) -> None:
    write_small_run(tmp_path / "run")
    assert main(["backup", str(tmp_path / "run"), str(tmp_path / "backups")]) == 0
    words = ("restore", str(tmp_path / "backups"), str(tmp_path / "new" / "again"))
    (tmp_path / "new").mkdir()
    for end in (signal.SIGTERM, signal.SIGKILL):
        ended(f"gspo_services.runs.backup.restore:{place}", 1, end, *words)
        assert not (tmp_path / "new" / "again").exists()
        if end is signal.SIGTERM:
            assert list((tmp_path / "new").iterdir()) == []
    assert main(list(words)) == 0
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["again"]


def test_an_export_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    # torch is imported for this one alone.
    from gspo_services.runs.export.__main__ import export_command
    from gspo_services.shared.settings.run_settings import write_run_settings
    from gspo_services.shared.settings.sections import Model, Run, Settings
    from tests.support.learner.tiny_model import save_tiny_model, tiny_qwen3_moe
    from tests.support.runs.model_checkpoints import write_model_checkpoint

    save_tiny_model(tmp_path / "model")
    run, target = tmp_path / "run", tmp_path / "exports" / "model"
    run.mkdir()
    write_run_settings(Settings(run=Run(directory=run), model=Model(path=tmp_path / "model")))
    write_model_checkpoint(run, tiny_qwen3_moe(seed=7), 11, 10)
    entry = "gspo_services.runs.export.__main__:main"
    for end in (signal.SIGTERM, signal.SIGKILL):
        ended("gspo_services.runs.export.writer:write_model", 1, end, str(run), "--to", str(target), entry=entry)
        assert not target.exists()
        if end is signal.SIGTERM:
            assert list(target.parent.iterdir()) == []
    assert export_command([str(run), "--to", str(target)]) == 0
    assert list(target.parent.iterdir()) == [target]

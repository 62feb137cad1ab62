"""What docs/guide/python.md shows works as shown."""

from pathlib import Path

import pytest

from tests.support.pages import shown
from tests.support.processes.small_run import write_small_run

PAGE = "docs/guide/python.md"


def test_the_program_that_reads_a_run_reads_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_small_run(tmp_path / "runs" / "arithmetic")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for first_line in ("from gspo.runs import Run", 'means = run.columns("trajectories", split="train")'):
        exec(compile(shown(PAGE, first_line), PAGE, "exec"), names)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 trajectories a group; 3 batches trained"
    assert lines[1].startswith("trajectory ")
    assert "reward 1, " in lines[1]
    assert lines[2].startswith("made by versions [")
    assert lines[4:-1] == ["group 0 of task 0: failed", "group 5 of task 5: stale", "group 6 of task 6: stale"]
    assert 0.2 < float(lines[-1]) < 0.8

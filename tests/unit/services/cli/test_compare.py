"""``gspo compare``: the table, the picture, JSON."""

import json
from pathlib import Path

import pytest

from gspo_services.cli.main import main
from tests.support.runs.written_runs import write_run


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    first = write_run(tmp_path / "a", [0.0, 0.5])
    second = write_run(tmp_path / "b", [0.0, 0.25], learning_rate=1e-5, num_batches=10)
    return [str(first), str(second)]


def test_tables_name_the_runs_the_settings_and_the_measures(
    runs: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["compare", *runs]) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for told in (
        "finished 2/2", "unfinished 2/10", "learner learning_rate 1e-06 1e-05", "best held-out reward 0.5 0.25",
        "batches to a held-out reward of 0.25 2 2",
    ):  # fmt: skip
        assert told in text, told


def test_a_picture_and_json_are_written(runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "compare.png"
    assert main(["compare", *runs, "--png", str(picture), "--json"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    plain = json.loads(capsys.readouterr().out)
    curve = plain["groups"][0]["curves"]["held_out"]["tokens"]
    assert (curve["x"], curve["mean"]) == ([0.0, 201.0], [0.0, 0.5])
    assert plain["differences"]["run.num_batches"] == {"A": "2", "B": "10"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "compare.png"]


def test_what_cannot_be_compared_or_written_is_an_error_with_status_2(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: str) -> str:
        assert main(["compare", *words]) == 2
        return capsys.readouterr().err

    assert "name at least two" in refused(runs[0])
    assert "there is no such directory" in refused(runs[0], str(tmp_path / "nothing"))
    assert "a directory: name a file" in refused(*runs, "--png", str(tmp_path))
    assert "No such file or directory" in refused(*runs, "--png", str(tmp_path / "none" / "x.png"))
    for run in runs:
        (Path(run) / "metrics.jsonl").write_text("")
    assert "there is nothing to draw" in refused(*runs, "--png", str(tmp_path / "x.png"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]

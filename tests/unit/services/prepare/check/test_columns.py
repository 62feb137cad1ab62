"""``gspo check``, ``gspo env try`` and ``gspo init`` say what becomes of each column of a row."""

import json
from pathlib import Path

import pytest

from gspo_services.prepare.env_try.command import main as env_try
from gspo_services.prepare.init.command import main as init
from tests.support.checking.projects import Project

ROWS = [
    {"question": f"{place}?", "context": "C.", "choices": ["a", "b"], "answer": place % 2, "id": place, "hint_image": "x"}
    for place in range(8)
]
SAID = "shown: question, context, choices; gold: answer; metadata: id; left out: hint_image"


@pytest.fixture
def choosing(project: Project) -> Project:
    project.write_rows("train.jsonl", ROWS)
    project.write_rows("eval.jsonl", [{"question": f"{place}!", "answer": str(place), "steps": "s"} for place in range(8)])
    paths = {f"{split}_path": str(project.folder / f"{split}.jsonl") for split in ("train", "eval")}
    project.keys |= {"environment.options": paths, "sampling.max_turn_tokens": 40, "sampling.max_tokens": 2000}
    return project


def test_check_names_each_column_and_warns_of_parts_of_a_question(choosing: Project) -> None:
    found = {finding.check: finding for finding in choosing.findings()}
    warned = found["train columns"]
    assert warned.status == "warn"
    assert warned.text == f"{SAID}. What is left out may be a part of the question: hint_image"
    assert "context_columns" in warned.way_out
    held_out = found["eval columns"]
    assert (held_out.status, held_out.text) == ("ok", "shown: question; gold: answer; left out: steps")
    assert found["train answers"].text == "8 read: 8 choices; choices: A. a, B. b"


def test_sources_of_different_columns_are_told_apart(choosing: Project) -> None:
    sources = [{"path": str(choosing.folder / f"{split}.jsonl")} for split in ("train", "eval")]
    choosing.keys["environment.options"] = {"sources": sources, "eval_path": sources[1]["path"]}
    said = [finding.text for finding in choosing.findings() if finding.check == "train columns"]
    assert [text.partition(":")[0] for text in said] == ["train", "eval"]


def test_env_try_shows_columns_and_options(choosing: Project, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(choosing.config), "--index", "1", "--answer", "\\boxed{b}"]
    assert env_try([*words, "--json"]) == 0
    episode = json.loads(capsys.readouterr().out)
    assert (episode["reward"], episode["columns"]) == (1.0, [SAID])
    assert "C.\n\n1?\n\nA. a\nB. b" in episode["turns"][0]["messages"][-1]["content"]
    assert env_try(words) == 0
    assert f"columns   {SAID}\n" in capsys.readouterr().out


def test_a_new_project_says_what_becomes_of_the_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert init(["p", "--kind", "maths", "--data", "rows.jsonl", "--defaults"]) == 0
    said = capsys.readouterr().out
    assert f"\ncolumns: {SAID}\nwarning: hint_image: left out, and may be a part of the question" in said

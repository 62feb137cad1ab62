"""What tasks expect, from what made them."""

import json
from pathlib import Path

import pytest

from gspo_services.runs.expected import ExpectedAnswers, expected_of
from gspo_services.shared.settings import Settings, override_settings


def expecting(directory: Path, *overrides: str) -> ExpectedAnswers:
    return ExpectedAnswers(directory, override_settings(Settings(), [f"run.directory={directory}", *overrides]))


def write_rows(path: Path, *numbers: int) -> Path:
    rows = [json.dumps({"question": f"How much is {number} + 0?", "answer": str(number)}) for number in numbers]
    path.write_text("".join(f"{row}\n" for row in rows))
    return path


def test_what_is_expected_is_said_of_any_task() -> None:
    assert expected_of({"prompt": "1+1", "answer": "2"}) == "2"
    assert expected_of({"prompt": "1+1", "answer": {"values": ["2"]}}) == '["2"]'
    assert expected_of({"problem": "1+1"}) == "1+1"
    assert expected_of({"prompt": "1+1", "answer": "\x1b[2J"}) == "\\x1b[2J"
    assert expected_of({"answer": "x" * 30}, 10) == "xxxxxxxxxx... (30 characters)"


def test_each_split_and_set_has_tasks_of_its_own(tmp_path: Path) -> None:
    train, held = write_rows(tmp_path / "train.jsonl", 1, 2), write_rows(tmp_path / "held.jsonl", 7)
    named = write_rows(tmp_path / "named.jsonl", 8, 9)
    of = expecting(
        tmp_path, "environment.name=dataset", f'environment.options.train_path="{train}"',
        f'environment.options.eval_path="{held}"',
        f'evaluation.sets.hard.options.eval_path="{named}"',
    )  # fmt: skip
    found = {name: of.of(name, [0]) for name in ("train", "eval", "eval/hard")}
    assert {name: "".join(answers.values()) for name, (answers, _) in found.items()} == {
        "train": "1", "eval": "7", "eval/hard": "8",
    }  # fmt: skip
    answers, error = of.of("train", [1, 5])
    assert (answers, error) == ({1: "2"}, "train task 5 is not there any more: its files are others than during the run")
    assert "the settings have no evaluation set 'gone'" in of.of("eval/gone", [0])[1]


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["environment.name=mine.sums:Sums"], "mine.sums:Sums is code of your own, which does not run for it"),
        (["environment.name=dataset", 'environment.options.train_path="gone.jsonl"'], "gone.jsonl"),
    ],
)
def test_why_nothing_is_known_is_said(tmp_path: Path, overrides: list[str], why: str) -> None:
    answers, error = expecting(tmp_path, *overrides).of("train", [0, 1])
    assert answers == {}
    assert error.startswith("what train tasks expect cannot be read here: ")
    assert why in error

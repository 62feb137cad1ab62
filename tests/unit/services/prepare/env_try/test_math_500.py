"""MATH-500 as a newcomer meets it: ``gspo init``, and then answers that are typed in, or piped."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gspo_services.prepare.env_try.command import main as env_try
from gspo_services.prepare.init.command import main as init
from tests.support.files.public_data import PUBLIC_DATA

ROWS = PUBLIC_DATA / "math500" / "test.jsonl"
WITH_ITS_UNIT = re.compile(r"\\circ|cents|mbox|\\\$|^x=5$|,\\!")
"""Golds of which a number is the whole answer, too."""


@pytest.mark.skipif(not ROWS.is_file(), reason=f"no MATH-500 in {ROWS.parent} (set GSPO_DATA_DIR)")
def test_each_gold_in_a_box_is_right_and_no_number_of_one_is(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    golds = [json.loads(line)["answer"] for line in ROWS.read_text(encoding="utf-8").splitlines()]
    assert init(["p", "--kind", "maths", "--data", str(ROWS), "--eval-data", str(ROWS), "--answer-tokens", "150"]) == 0
    capsys.readouterr()
    monkeypatch.chdir("p")

    def rewards(split: str, said: Callable[[str], str], number: int) -> list[float]:
        typed = tmp_path / f"{split}.txt"
        lines = (f"Therefore it is $\\boxed{{{said(gold)}}}$.\n" for gold in golds[:number])
        typed.write_text("".join(lines), encoding="utf-8")
        with typed.open() as file:
            monkeypatch.setattr(sys, "stdin", file)
            words = ["--model", str(chat_model), "--split", split, "--tasks", str(number), "--type", "--json"]
            assert env_try(["run.toml", *words]) == 0
        return [json.loads(line)["reward"] for line in capsys.readouterr().out.splitlines()]

    assert rewards("train", lambda gold: gold, len(golds)) == [1.0] * 500

    def fragment(gold: str) -> str:
        return next((number for number in re.findall(r"\d+(?:\.\d+)?", gold) if number != gold), "nothing")

    found = rewards("eval", fragment, 100)
    paid = [gold for gold, reward in zip(golds, found, strict=False) if reward]
    assert len(found) == 100
    assert [gold for gold in paid if not WITH_ITS_UNIT.search(gold)] == []

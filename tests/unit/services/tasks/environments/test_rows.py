"""Rows of files as tasks: every column, and the errors of rows that cannot be tasks."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from gspo_protocol.limits import MAX_TASK_BYTES
from gspo_services.tasks.environments import create_task_set

GOOD = {"question": "1+1?", "files": ["a", "b"], "limits": {"s": 1.5, "of": None}}


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def tasks_of(path: Path, **options: Any) -> list[Any]:
    source = create_task_set("rows", {"train_path": str(path), **options}).tasks("train")
    assert source.num_tasks is not None
    with pytest.raises(IndexError, match=f"there are {source.num_tasks}"):
        source.task(source.num_tasks)
    return [source.task(index) for index in range(source.num_tasks)]


def test_a_row_is_a_task_with_all_its_columns(tmp_path: Path) -> None:
    assert tasks_of(written(tmp_path / "a.jsonl", GOOD, "", {"other": True})) == [GOOD, {"other": True}]
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x", None], "tags": [["a"], []]}), tmp_path / "a.parquet")
    assert tasks_of(tmp_path / "a.parquet") == [{"text": "x", "tags": ["a"]}, {"text": None, "tags": []}]


BAD_ROWS = [
    ("{", "not JSON"),
    ("[1]", "a JSON object is needed, found list"),
    ({"text": "x" * MAX_TASK_BYTES}, f"bytes, {MAX_TASK_BYTES} allowed"),
    ('{"number": 1' + 30 * "0" + "}", 'column "number" holds'),
    ('{"' + 70_000 * "c" + '": 1' + 30 * "0" + "}", 'column "ccc'),
    ('{"deep": ' + 40 * "[" + 40 * "]" + "}", 'column "deep" is nested more than'),
]


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS)
def test_a_row_that_cannot_be_a_task_stops_the_run_or_is_left_out(tmp_path: Path, row: Any, reason: str) -> None:
    path = written(tmp_path / "a.jsonl", GOOD, row)
    with pytest.raises(ValueError) as refusal:
        tasks_of(path)
    assert str(refusal.value).startswith(f"{path}, line 2: ")
    assert reason in str(refusal.value)
    assert len(str(refusal.value)) < 1000
    assert tasks_of(path, on_bad_row="skip") == [GOOD]


@pytest.mark.parametrize(
    ("value", "reason"), [(date(2026, 1, 1), "holds a date"), (float("nan"), "holds nan, which JSON cannot represent")]
)
def test_what_json_does_not_have_is_a_bad_row_of_parquet(tmp_path: Path, value: Any, reason: str) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"when": [value]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=f'row 1: column "when" {reason}'):
        tasks_of(tmp_path / "a.parquet")


def test_a_split_without_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the rows task set needs eval_path for its eval split"):
        create_task_set("rows", {"train_path": "a.jsonl"}).tasks("eval")
    with pytest.raises(ValueError, match="correct train_path or eval_path"):
        create_task_set("rows", {"train_path": str(tmp_path / "absent.jsonl")}).tasks("train")
    with pytest.raises(ValueError, match="has no usable row"):
        tasks_of(written(tmp_path / "empty.jsonl", ""))

"""Rows of public sets of mathematics load as they are; the rows here are ours."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from gspo_services.tasks.environments import create_environment


def tasks(path: Path, **options: Any) -> list[dict[str, Any]]:
    source = create_environment("math", {"eval_path": str(path), **options}).tasks("eval")
    assert source.num_tasks is not None
    return [source.task(index) for index in range(source.num_tasks)]


@pytest.mark.parametrize(
    ("row", "answer", "name"),
    [
        (
            {"id": 60, "problem": "P?", "solution": "... \\boxed{5}", "answer": "204", "url": "u", "year": "2024"},
            "204",
            "60",
        ),
        ({"ID": "2024-I-1", "Problem": "P?", "Solution": "s", "Answer": 33}, "33", "2024-I-1"),
        ({"id": 0, "problem": "P?", "solution": "So $\\boxed{073}$.", "url": "u"}, "073", "0"),
        ({"question": "P?", "answer": "70"}, "70", ""),
        ({"question": "P?", "answer": "So 3 + 4.\n#### 7"}, "7", ""),
        ({"problem": "P?", "answer": "\\frac{1}{2}", "unique_id": "test/1.json", "level": 2}, "\\frac{1}{2}", "test/1.json"),
        ({"problem": "P?", "answer": 7.0}, "7", ""),
    ],
)
def test_layouts_of_public_sets(tmp_path: Path, row: dict[str, Any], answer: str, name: str) -> None:
    lines, table = tmp_path / "a.jsonl", tmp_path / "a.parquet"
    lines.write_text(json.dumps(row))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), table)
    for path, place in ((lines, "line 1"), (table, "row 1")):
        (task,) = tasks(path)
        expected = {"prompt": "P?", "answer": answer, "place": f"{path}, {place}"}
        assert task == (expected | {"name": name} if name else expected)


@pytest.mark.parametrize(
    ("row", "options", "says"),
    [
        ({"answer": "1"}, {}, "or conversation: there are answer (problem_column says which to use)"),
        ({"problem": "P"}, {}, "or answers_spans: there are problem (answer_column says which to use)"),
        ({"problem": "P", "solution": "It is 7."}, {}, 'column "solution" has no \\boxed{...} with an answer'),
        ({"problem": "P", "answer": ""}, {}, 'column "answer" is empty: the row has no answer'),
        ({"problem": "P", "answer": None}, {}, 'column "answer" is None, not an answer'),
        ({"problem": " ", "answer": "1"}, {}, 'column "problem" is empty: nothing is asked'),
        ({"problem": "P", "answer": "x+1"}, {"kind": "integer"}, "its answer is 'x+1', not an integer; kind = \"symbolic\""),
        ({"problem": "P", "answer": "1"}, {"task_columns": ["level"]}, 'no column "level": there are answer, problem'),
        ({"problem": "P", "answer": "1"}, {"task_columns": ["answer"]}, 'task_columns names "answer", which is taken'),
    ],
)
def test_a_bad_row_is_named_with_file_and_line(
    tmp_path: Path, row: dict[str, Any], options: dict[str, Any], says: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n" + json.dumps(row))
    with pytest.raises(ValueError, match=r"a.jsonl, line 2: ") as refusal:
        tasks(path, **options)
    assert says in str(refusal.value)


def test_columns_go_with_the_task_where_they_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"problem": "P", "answer": "1", "rating": 1200}))
    assert tasks(path, task_columns=["rating"])[0]["rating"] == 1200


def test_a_marked_answer_needs_a_marker() -> None:
    with pytest.raises(ValueError, match='marker is "", and answer_form is "marked"'):
        create_environment("math", {"answer_form": "marked", "marker": ""})

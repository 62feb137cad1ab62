"""Rows of the environments of programs: what is bad is named with file and line, and nothing else is lost."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from gspo_services.tasks.environments import create_environment

TEST = {"input": "1", "output": "2"}
GOOD = {"prompt": "Add one.", "tests": [TEST], "name": "p1", "rating": 1200, "date": "2024-05-01", "difficulty": "easy"}


def tasks(folder: Path, *rows: dict[str, Any], environment: str = "code", **options: Any) -> list[dict[str, Any]]:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    source = create_environment(environment, {"train_path": str(path), **options}).tasks("train")
    assert source.num_tasks is not None
    return [source.task(index) for index in range(source.num_tasks)]


def test_a_row_is_a_task_with_its_problem_and_what_evaluation_asks(tmp_path: Path) -> None:
    (task,) = tasks(tmp_path, GOOD)
    assert {name: task[name] for name in ("prompt", "name", "rating", "date", "difficulty")} == {
        "prompt": "Add one.", "name": "p1", "rating": 1200, "date": "2024-05-01", "difficulty": "easy",
    }  # fmt: skip
    assert (task["place"], task["problem"]) == (f"{tmp_path}/rows.jsonl, line 1", {"tests": [TEST]})


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "?", "tests": []}, "it has no tests"),
        (
            {"prompt": "?", "tests": [{"input": "1"}]},
            r'column "tests", test 1 is .*expected \{"input": ..., "output": ...\}',
        ),
        ({"prompt": "?", "tests": [{"input": 1, "output": "2"}]}, "test 1: input and output must be text"),
        ({"prompt": "?", "tests": "[}"}, 'column "tests" is not JSON'),
        ({"prompt": " ", "tests": [TEST]}, 'column "prompt" is'),
        ({"question": "?"}, "its columns .question. are those of no layout that is known .own: prompt, tests"),
        ({**GOOD, "time_limit_s": -1}, 'column "time_limit_s" is -1: expected a number above 0'),
        ({**GOOD, "rating": "hard"}, """column "rating" is 'hard', not a number"""),
        ({**GOOD, "date": "May"}, """column "date" is 'May', not a date such as 2024-01-31"""),
        ({**GOOD, "checker": {"source": "1"}}, "missing required field `language`"),
        ({**GOOD, "checker": {"source": "1", "language": "python"}}, 'it has a checker: the environment "contest" runs'),
        ({**GOOD, "prompt": "x" * 600_000}, "bytes, 524288 allowed"),
    ],
)
def test_a_bad_row_is_named_with_file_line_and_way_out(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=rf"rows.jsonl, line 2: .*{says}(.|\n)*on_bad_row"):
        tasks(tmp_path, GOOD, row)
    assert len(tasks(tmp_path, GOOD, row, {**GOOD, "prompt": "Add two."}, on_bad_row="skip")) == 2


def test_problems_are_kept_by_their_day(tmp_path: Path) -> None:
    rows = [{**GOOD, "name": day, "date": day} for day in ("2024-04-30", "2024-05-01T10:00:00", "2024-06-01")]
    found = tasks(tmp_path, *rows, since="2024-05-01", until="2024-06-01")
    assert [task["name"] for task in found] == ["2024-05-01T10:00:00"]
    with pytest.raises(ValueError, match="3 outside since, until and the filter"):
        tasks(tmp_path, *rows, since="2030-01-01")
    with pytest.raises(ValueError, match="line 1: it has no date, and since or until ask for one"):
        tasks(tmp_path, {"prompt": "?", "tests": [TEST]}, since=date(2024, 1, 1))


def test_problems_of_contests_are_kept_by_their_rating(tmp_path: Path) -> None:
    rows = [{**GOOD, "rating": rating} for rating in (800, 1200, 1600)]
    found = tasks(tmp_path, *rows, environment="contest", min_rating=1000, max_rating=1200)
    assert [task["rating"] for task in found] == [1200]
    with pytest.raises(ValueError, match="line 1: it has no rating, and min_rating or max_rating ask for one"):
        tasks(tmp_path, {"prompt": "?", "tests": [TEST]}, environment="contest", max_rating=900)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"languages": ["rust"]}, r"languages is \['rust'\]: expected some of cpp, python; say how another one runs in"),
        ({"languages": []}, r"languages is \[\]"),
        ({"test_s": 0}, "test_s"),
        ({"memory_bytes": 1}, "memory_bytes"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        create_environment("code", options)


def test_a_checker_in_a_language_that_is_not_known_is_refused_with_its_row(tmp_path: Path) -> None:
    row = {**GOOD, "checker": {"source": "1", "language": "pascal"}}
    with pytest.raises(ValueError, match='line 1: its checker is in "pascal": expected one of cpp, python, or say'):
        tasks(tmp_path, row, environment="contest")
    with pytest.raises(ValueError, match=r"testlib_path is /no/testlib.h, which cannot be read"):
        tasks(tmp_path, GOOD, environment="contest", testlib_path="/no/testlib.h")

"""Tests of many megabytes stay in their file, and are read again where programs are scored."""

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pyarrow.parquet
import pytest

from gspo_services.tasks.environments import create_environment
from gspo_services.tasks.environments.layouts import KeptRows
from gspo_services.tasks.environments.programs import FiledTests, Problem, ProgramTest


def large_row(seed: int) -> dict[str, Any]:
    """Tests that do not compress well, and a question that is always the same."""
    rng = random.Random(seed)
    tests = [{"input": " ".join(str(rng.random()) for _ in range(4000)), "output": str(seed)} for _ in range(5)]
    return {"prompt": "P", "tests": tests}


def problems(path: Path) -> list[Problem]:
    source = create_environment("code", {"train_path": str(path)}).tasks("train")
    return [msgspec.convert(source.task(index)["problem"], Problem) for index in range(source.num_tasks or 0)]


def written(folder: Path, suffix: str, rows: list[dict[str, Any]]) -> Path:
    path = folder / f"rows.{suffix}"
    if suffix == "jsonl":
        # An empty line counts as one.
        path.write_text("\n" + "\n".join(json.dumps(row) for row in rows) + "\n")
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_large_tests_stay_in_the_file_and_are_read_from_it(tmp_path: Path, suffix: str) -> None:
    rows = [large_row(seed) for seed in range(3)]
    path = written(tmp_path, suffix, [*rows[:2], {"prompt": "small", "tests": [{"input": "", "output": ""}]}, rows[2]])
    first, second, small, third = problems(path)
    assert small.in_file is None
    assert small.carried_tests() == [ProgramTest(input="", output="")]
    kept = KeptRows()
    for problem, row in ((third, rows[2]), (first, rows[0]), (second, rows[1]), (third, rows[2])):
        assert problem.in_file is not None
        assert (problem.tests, problem.packed) == ([], "")
        assert msgspec.to_builtins(kept.tests(problem.in_file)) == row["tests"]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_file_that_is_gone_or_was_changed_is_an_error(tmp_path: Path, suffix: str) -> None:
    path = written(tmp_path, suffix, [large_row(0)])
    (problem,) = problems(path)
    asked = problem.in_file
    assert asked is not None
    with pytest.raises(ValueError, match=r"has 1 rows, and row 9|has 2 lines, and line 9"):
        KeptRows().tests(msgspec.structs.replace(asked, row=9))
    written(tmp_path, suffix, [large_row(1)])
    with pytest.raises(ValueError, match=r"other tests in row . than when the task was made"):
        KeptRows().tests(asked)
    path.unlink()
    with pytest.raises(ValueError, match=r"there is no file .*rows\.\w+ where programs are scored: rollouts need it"):
        KeptRows().tests(asked)


def test_tests_are_kept_up_to_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gspo_services.tasks.environments.layouts.kept_rows.KEPT_BYTES", 1)
    path = written(tmp_path, "jsonl", [large_row(0), large_row(1)])
    asked: list[FiledTests] = [problem.in_file for problem in problems(path) if problem.in_file is not None]
    kept = KeptRows()
    for one in asked:
        kept.tests(one)
    path.unlink()
    assert len(kept.tests(asked[1])) == 5
    with pytest.raises(ValueError, match="there is no file"):
        kept.tests(asked[0])


def test_lines_are_found_anew_in_a_file_that_was_written_again(tmp_path: Path) -> None:
    path = written(tmp_path, "jsonl", [large_row(0), large_row(1)])
    kept = KeptRows()
    for problem in problems(path):
        assert problem.in_file is not None
        kept.tests(problem.in_file)
    written(tmp_path, "jsonl", [{"prompt": "new", "tests": [{"input": "", "output": ""}]}, large_row(2), large_row(3)])
    _, second, third = problems(path)
    for problem, row in ((third, large_row(3)), (second, large_row(2))):
        assert problem.in_file is not None
        assert msgspec.to_builtins(kept.tests(problem.in_file)) == row["tests"]

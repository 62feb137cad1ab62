"""Tests of open-r1/codeforces that lie in files of their own, and rows that are incomplete without them."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pyarrow.parquet
import pytest

from gspo_services.tasks.environments import create_environment
from gspo_services.tasks.environments.layouts import KeptRows
from gspo_services.tasks.environments.programs import Problem, ProgramTest

ROW: dict[str, Any] = {
    "id": "7/B", "description": "Add.", "official_tests": [{"input": "1 2", "output": "3"}],
    "official_tests_complete": False, "testset_size": 60, "generated_tests": 2,
    "examples": [{"input": "1 2", "output": "3"}], "time_limit": 1.0, "memory_limit": 64.0,
}  # fmt: skip
NAME = "test_cases_0007.parquet"


def copy_of_the_set(folder: Path, *rows: dict[str, Any], generated: str = "generated_tests") -> Path:
    """The layout of the data set: rows in data/, generated tests beside that."""
    (folder / "data").mkdir()
    (folder / generated).mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), folder / "data" / "train-0.parquet")
    tests = [("7/A", "0", "1"), ("7/B", "40 2\r\n", "42\r\n"), ("7/B", "5 5", "10")]
    table = [{"problem_id": of, "input": given, "output": said, "test_case_i": 0} for of, given, said in tests]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), folder / generated / NAME)
    return folder / "data" / "train-0.parquet"


def problem(path: Path, **options: Any) -> Problem:
    task = create_environment("code", {"train_path": str(path), **options}).tasks("train").task(0)
    return msgspec.convert(task["problem"], Problem)


def test_generated_tests_are_found_beside_the_rows_and_read_where_programs_are_scored(tmp_path: Path) -> None:
    found = problem(copy_of_the_set(tmp_path, ROW))
    assert found.tests == [ProgramTest(input="1 2", output="3", public=True)]
    assert found.generated is not None
    assert (found.generated.path, found.total_s) == (str(tmp_path / "generated_tests" / NAME), 11.0)
    assert (found.time_limit_s, found.memory_bytes) == (1.0, 64 << 20)
    kept, other = KeptRows(), msgspec.structs.replace(found.generated, problem="7/A", num_tests=1)
    assert kept.tests(found.generated) == [
        ProgramTest(input="40 2\n", output="42\n"),
        ProgramTest(input="5 5", output="10"),
    ]
    assert kept.tests(other) == [ProgramTest(input="0", output="1")], "of the same file"


def test_they_may_lie_in_a_folder_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = copy_of_the_set(tmp_path, ROW, generated="elsewhere")
    with pytest.raises(
        ValueError, match=r"row 1: its official tests are incomplete .* 2 generated tests are not in .*hf download"
    ):
        problem(path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for named in (str(tmp_path / "elsewhere"), "~/elsewhere", "$HOME/elsewhere"):
        found = problem(path, generated_tests_path=named).generated
        assert found is not None
        assert found.path == str(tmp_path / "elsewhere" / NAME)
    with pytest.raises(ValueError, match="has no usable row"):
        problem(path, on_bad_row="skip")


def test_a_complete_row_needs_none_and_takes_those_that_are_there(tmp_path: Path) -> None:
    path = copy_of_the_set(tmp_path, {**ROW, "official_tests_complete": True})
    assert problem(path).generated is not None
    (tmp_path / "generated_tests" / NAME).unlink()
    assert problem(path).generated is None


def test_tests_that_were_merged_into_the_row_complete_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({**ROW, "generated_tests": [{"input": "4 5", "output": "9"}]}))
    assert [test.output for test in problem(path).tests] == ["3", "9"]


def test_a_problem_is_the_same_wherever_its_tests_lie(tmp_path: Path) -> None:
    identities = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        path = copy_of_the_set(tmp_path / name, ROW)
        source: Any = create_environment("code", {"train_path": str(path)}).tasks("train")
        identities.append(source.identity(0))
    assert identities[0] == identities[1]


def test_a_file_that_is_gone_or_damaged_or_has_fewer_tests_is_an_error(tmp_path: Path) -> None:
    asked = problem(copy_of_the_set(tmp_path, ROW)).generated
    assert asked is not None
    with pytest.raises(ValueError, match="has 2 tests of problem 7/B, and its row says 3: fetch the file again"):
        KeptRows().tests(msgspec.structs.replace(asked, num_tests=3))
    path = tmp_path / "generated_tests" / NAME
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="is no Parquet file with the columns problem_id, input and output"):
        KeptRows().tests(asked)
    path.unlink()
    with pytest.raises(ValueError, match=r"there is no file .* where programs are scored"):
        KeptRows().tests(asked)

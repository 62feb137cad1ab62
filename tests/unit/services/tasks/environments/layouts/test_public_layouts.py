"""Rows in the layouts of public sets, as their own loaders read them. The rows are ours."""

import base64
import json
import pickle  # noqa: TID251
import zlib
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from gspo.tasks.environments import RewardJob
from gspo_services.tasks.environments import create_environment
from gspo_services.tasks.environments.layouts import ProgramRow, program_row
from gspo_services.tasks.environments.programs import CheckerProgram, ProgramTest


def packed(tests: object) -> str:
    """As code_generation_lite has its private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


STDIN = {"input": "1 2\n", "output": "3\n", "testtype": "stdin"}
HIDDEN = {"input": "4 5\n", "output": "9\n", "testtype": "stdin"}
LIVE: dict[str, Any] = {
    "question_title": "Sum", "question_content": "Add two numbers.", "platform": "atcoder", "question_id": "abc1_a",
    "contest_id": "abc1", "contest_date": "2024-02-03T00:00:00", "starter_code": "", "difficulty": "easy",
    "public_test_cases": json.dumps([STDIN]), "private_test_cases": packed([HIDDEN]), "metadata": "{}",
}  # fmt: skip
CALL = {"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}
LIVE_FUNCTION = {
    **LIVE, "platform": "leetcode", "starter_code": "class Solution:\n    def total(self, a, b):\n        ",
    "public_test_cases": json.dumps([CALL]), "private_test_cases": json.dumps([CALL]),
    "metadata": json.dumps({"func_name": "total"}),
}  # fmt: skip
APPS: dict[str, Any] = {
    "problem_id": 7, "question": "Add two numbers.", "solutions": json.dumps(["print(3)", "print(1 + 2)"]),
    "input_output": json.dumps({"inputs": ["1 2\n", ["4", "5"]], "outputs": ["3\n", ["9"]]}), "difficulty": "interview",
    "url": "", "starter_code": "",
}  # fmt: skip
TACO = {
    **APPS, "name": "SUM", "time_limit": "2.0 seconds", "memory_limit": "256.0 megabytes", "date": "2021-03-04",
    "difficulty": "EASY", "solutions": json.dumps([]), "starter_code": "def total(a, b):\n\t",
    "input_output": json.dumps({"fn_name": "total", "inputs": [[[1, 2], 3]], "outputs": [[6]]}),
}  # fmt: skip
CONTESTS: dict[str, Any] = {
    "name": "1_A. Sum", "description": "Add two numbers.",
    "public_tests": {"input": ["1 2\n"], "output": ["3\n"]}, "private_tests": {"input": ["4 5\n"], "output": ["9\n"]},
    "generated_tests": {"input": ["7 8\n"], "output": ["15\n"]}, "source": 2, "difficulty": 7, "cf_rating": 900,
    "solutions": {"language": [2, 3], "solution": ["int main() {}", "print(3)"]},
    "time_limit": {"seconds": 1, "nanos": 500_000_000}, "memory_limit_bytes": 256_000_000,
    "input_file": "", "output_file": "",
}  # fmt: skip
DEEP: dict[str, Any] = {"problem": "Add two numbers.", "solutions": ["print(3)"], "starter_code": None, "metadata": "{}"}
STDIN_TESTS = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin_stdout"}]
VERL: dict[str, Any] = {
    "data_source": "taco",
    "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": "Add two numbers."}],
    "ability": "code", "extra_info": {"split": "train", "index": 5},
    "reward_model": {"style": "rule", "ground_truth": json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]})},
}  # fmt: skip
PRIME: dict[str, Any] = {
    "problem_id": "vcp_1", "problem_statement": "Add two numbers.", "gold_standard_solution": "print(3)", "metadata": {},
    "verification_info": {"language": "python", "test_cases": [
        {"type": "stdin_stdout", "fn_name": None, "input": "1 2\n", "output": "3\n"},
    ]},
}  # fmt: skip
FORCES: dict[str, Any] = {
    "id": "1/A", "contest_start": 1268409600, "time_limit": 1.0, "memory_limit": 64.0, "title": "Factors",
    "description": "Find two factors.", "input_format": "A number.", "output_format": "Two numbers.",
    "interaction_format": None, "note": None, "examples": [{"input": "6", "output": "2 3"}],
    "rating": 1000, "official_tests": [{"input": "6\n", "output": "2 3\n"}, {"input": "4\n", "output": "2 2\n"}],
    "official_tests_complete": True, "input_mode": "stdio", "generated_checker": "print(1)", "generated_tests": 12,
}  # fmt: skip


def test_a_row_of_livecodebench_with_packed_private_tests() -> None:
    assert program_row(LIVE, "") == ProgramRow(
        statement="Add two numbers.",
        tests=[ProgramTest(input="1 2\n", output="3\n", public=True), ProgramTest(input="4 5\n", output="9\n")],
        owner="livecodebench",
        time_limit_s=6.0,
        memory_bytes=4 << 30,
        total_s=19.0,
        name="abc1_a",
        difficulty="easy",
        date=date(2024, 2, 3),
    )


def test_a_row_of_livecodebench_that_names_a_function() -> None:
    row = program_row(LIVE_FUNCTION, "")
    assert (row.function, row.starter_code) == ("total", LIVE_FUNCTION["starter_code"])
    assert [test.public for test in row.tests] == [True, False]
    assert row.tests[1] == ProgramTest(input="[1, 2]\n3", output="6")


def test_rows_of_apps_and_taco() -> None:
    assert program_row(APPS, "") == ProgramRow(
        statement="Add two numbers.",
        tests=[ProgramTest(input="1 2\n", output="3\n"), ProgramTest(input="4\n5", output="9")],
        owner="prime",
        time_limit_s=4.0,
        total_s=15.0,
        solution="print(3)",
        name="7",
        difficulty="interview",
    )
    assert program_row(TACO, "") == ProgramRow(
        statement="Add two numbers.",
        tests=[ProgramTest(input="[1, 2]\n3", output="[6]")],
        function="total",
        starter_code="def total(a, b):\n\t",
        owner="prime",
        time_limit_s=4.0,
        total_s=10.0,
        name="SUM",
        difficulty="EASY",
        date=date(2021, 3, 4),
    )


def test_a_row_of_codeforces_with_its_checker() -> None:
    assert program_row(FORCES, "") == ProgramRow(
        statement="# Factors\n\nTime limit per test: 1 seconds\nMemory limit per test: 64 megabytes\n\n"
        "Find two factors.\n\n## Input\nA number.\n\n## Output\nTwo numbers.\n\n"
        "## Example 1\nInput:\n6\nOutput:\n2 3",
        tests=[ProgramTest(input="6\n", output="2 3\n", public=True), ProgramTest(input="4\n", output="2 2\n")],
        num_generated=12,
        owner="codeforces",
        checker=CheckerProgram(source="print(1)", language="python", kind="prints"),
        time_limit_s=1.0,
        memory_bytes=64 << 20,
        total_s=33.0,
        name="1/A",
        rating=1000,
        date=date(2010, 3, 12),
    )


def test_a_prompt_of_the_set_is_asked_as_it_is_and_for_its_language(tmp_path: Path) -> None:
    """As in the configuration verifiable-prompts."""
    path = tmp_path / "rows.jsonl"
    rows = [{**FORCES, "language": language, "prompt": f"Write {language}."} for language in ("python", "cpp")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = create_environment("contest", {"train_path": str(path)})
    start = environment.start(environment.tasks("train").task(1), 0)
    assert start.messages == [{"role": "user", "content": "Write cpp."}]
    job = environment.step(start.state, "```cpp\nright\n```\n```python\nother\n```").reward
    assert isinstance(job, RewardJob)
    assert (job.arguments["source"], job.arguments["language"]) == ("right\n", "cpp")


def test_a_file_as_codeforces_publishes_it_keeps_the_rows_that_can_be_scored(tmp_path: Path) -> None:
    rows = [
        FORCES, {**FORCES, "id": "2/A", "rating": None}, {**FORCES, "interaction_format": "ask"},
        {**FORCES, "input_mode": "file"}, {**FORCES, "official_tests": [], "official_tests_complete": False},
        {**FORCES, "id": "3/A", "examples": None}, {**FORCES, "id": "4/A", "time_limit": None},
        {**FORCES, "official_tests": None, "generated_tests": 0}, {**FORCES, "executable": False},
    ]  # fmt: skip
    path = tmp_path / "train-00000-of-00001.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    source = create_environment("contest", {"eval_path": str(path), "on_bad_row": "skip"}).tasks("eval")
    tasks: list[dict[str, Any]] = [source.task(index) for index in range(source.num_tasks or 0)]
    assert [task["name"] for task in tasks] == ["1/A", "2/A", "3/A", "4/A"]
    assert "Time limit per test" not in tasks[3]["prompt"]


def test_a_row_of_code_contests() -> None:
    assert program_row(CONTESTS, "") == ProgramRow(
        statement="Time limit per test: 1.5 seconds\nMemory limit per test: 244.141 megabytes\n\nAdd two numbers.",
        tests=[
            ProgramTest(input="1 2\n", output="3\n", public=True),
            ProgramTest(input="4 5\n", output="9\n"),
            ProgramTest(input="7 8\n", output="15\n"),
        ],
        owner="code_contests",
        time_limit_s=1.5,
        memory_bytes=256_000_000,
        total_s=12.5,
        solution="print(3)",
        name="1_A. Sum",
        rating=900,
    )


def test_rows_of_deepcoder_in_each_form_of_its_tests() -> None:
    plain = program_row({**DEEP, "tests": json.dumps(STDIN_TESTS)}, "")
    assert (plain.owner, plain.function, plain.tests) == ("livecodebench", "", [ProgramTest(input="1 2\n", output="3\n")])
    call = program_row({**DEEP, "tests": [CALL], "metadata": {"func_name": "total"}}, "")
    assert (call.owner, call.function, call.tests) == (
        "livecodebench",
        "total",
        [ProgramTest(input="[1, 2]\n3", output="6")],
    )
    taco = program_row({**DEEP, "tests": json.dumps({"inputs": [["1 2", "3"]], "outputs": [["3"]]})}, "")
    assert (taco.owner, taco.tests) == ("livecodebench", [ProgramTest(input="1 2\n3", output="3")])
    named = program_row({**DEEP, "tests": json.dumps({"fn_name": "f", "inputs": [[1, "a"]], "outputs": [["b"]]})}, "")
    assert (named.owner, named.function, named.tests) == ("prime", "f", [ProgramTest(input='1\n"a"', output='["b"]')])
    typed = [{"type": "function_call", "fn_name": "f", "input": [1], "output": [2]}]
    prime = program_row({**DEEP, "tests": typed}, "")
    assert (prime.owner, prime.function, prime.tests) == ("prime", "f", [ProgramTest(input="1", output="[2]")])


def test_rows_of_verl_bring_their_own_prompt(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([VERL]), path)
    environment = create_environment("code", {"train_path": str(path)})
    task: dict[str, Any] = environment.tasks("train").task(0)
    assert environment.start(task, 0).messages == VERL["prompt"]
    assert (task["name"], task["problem"]["owner"]) == ("taco/5", "prime")
    assert task["problem"]["tests"] == [{"input": "1 2\n", "output": "3\n"}]
    call = {"fn_name": "f", "inputs": ["[1, 2]\n3"], "outputs": ["6"]}
    row = program_row({**VERL, "reward_model": {"ground_truth": json.dumps(call)}}, "")
    assert (row.function, row.tests) == ("f", [ProgramTest(input="[1, 2]\n3", output="6")])


def test_a_row_of_primeintellect_and_of_its_copies() -> None:
    for info in (PRIME["verification_info"], json.dumps(PRIME["verification_info"])):
        row = program_row({**PRIME, "verification_info": info}, "")
        assert (row.statement, row.language, row.owner, row.name) == ("Add two numbers.", "python", "prime", "vcp_1")
        assert row.tests == [ProgramTest(input="1 2\n", output="3\n")]


DAMAGED = LIVE["private_test_cases"]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({**LIVE, "private_test_cases": DAMAGED[:40]}, 'column "private_test_cases" does not unpack'),
        ({**LIVE, "private_test_cases": "!" + DAMAGED}, 'column "private_test_cases" does not unpack'),
        (
            {**LIVE, "private_test_cases": base64.b64encode(zlib.compress(pickle.dumps([HIDDEN]))).decode()},
            "expected one text and nothing else",
        ),
        ({**LIVE, "private_test_cases": packed({"input": "1"})}, 'column "private_test_cases" is dict, not a list of tests'),
        ({**LIVE, "public_test_cases": "["}, 'column "public_test_cases" is not JSON'),
        ({**LIVE, "public_test_cases": "[]", "private_test_cases": "[]"}, "it has no tests"),
        ({**LIVE_FUNCTION, "metadata": "{}"}, 'its tests are functional, and column "metadata" has no func_name'),
        ({**APPS, "input_output": ""}, 'column "input_output" is empty'),
        ({**APPS, "input_output": '{"inputs": ["1"], "outputs": []}'}, "has 1 inputs and 0 outputs"),
        ({**APPS, "input_output": '{"inputs": []}'}, 'has no lists "inputs" and "outputs"'),
        ({**APPS, "input_output": '{"inputs": [{}], "outputs": ["1"]}'}, "test 1: {} is neither text nor a list of lines"),
        ({**FORCES, "interaction_format": "ask"}, "it is interactive"),
        (
            {**CONTESTS, "input_file": "in.txt"},
            """column "input_file" is 'in.txt': only problems that read standard input""",
        ),
        ({**CONTESTS, "private_tests": []}, 'column "private_tests" is []: expected {"input": [...], "output": [...]}'),
        ({**CONTESTS, "time_limit": "1"}, """column "time_limit" is '1': expected"""),
        ({**DEEP, "tests": [{**CALL}]}, "test 1 calls a function, and nothing says which"),
        ({**DEEP, "tests": [{"input": "1"}]}, 'column "tests", test 1 is'),
        (
            {**DEEP, "tests": [CALL, *STDIN_TESTS], "metadata": {"func_name": "f"}},
            'column "tests" calls f and not always the same',
        ),
        ({**VERL, "reward_model": {"ground_truth": "204"}}, "reward_model.ground_truth is '204', and no tests of a program"),
        ({**VERL, "reward_model": {"style": "rule"}}, 'expected a map with "ground_truth"'),
        ({**VERL, "prompt": []}, 'column "prompt" is []: expected messages or text'),
        ({**PRIME, "verification_info": {}}, 'expected a map with "test_cases"'),
        ({**FORCES, "input_mode": "file"}, "only problems that read standard input"),
        ({**FORCES, "executable": False}, 'column "executable" is false'),
        ({**FORCES, "official_tests": [], "generated_tests": 0}, "it has no tests"),
        ({**FORCES, "language": "rust"}, 'it asks for a program in "rust": add that to languages'),
        ({**FORCES, "official_tests_complete": False, "generated_tests": 0}, "nobody has generated others"),
        ({**FORCES, "official_tests_complete": None}, "its 12 generated tests are not in"),
        ({**FORCES, "official_tests_complete": False, "id": "x"}, """column "id" is "x": expected contest/problem"""),
    ],
)
def test_a_bad_row_is_named_with_file_line_and_column(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(ValueError, match=r"rows.jsonl, line 1: ") as refusal:
        create_environment("contest", {"train_path": str(path)}).tasks("train")
    assert says in str(refusal.value)


def test_a_parquet_file_of_a_public_set_loads_as_it_is(tmp_path: Path) -> None:
    """Dates may be dates there, and lists are lists."""
    path = tmp_path / "test.parquet"
    day = datetime(2024, 2, 3)
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{**LIVE, "contest_date": day}, {**LIVE_FUNCTION, "contest_date": day}]), path
    )
    source = create_environment("code", {"eval_path": str(path), "since": "2024-02-01"}).tasks("eval")
    tasks: list[dict[str, Any]] = [source.task(index) for index in range(source.num_tasks or 0)]
    assert [task["date"] for task in tasks] == ["2024-02-03"] * 2
    assert tasks[1]["place"] == f"{path}, row 2"
    assert tasks[1]["prompt"].endswith("```python\nclass Solution:\n    def total(self, a, b):\n```")


def test_a_layout_that_is_named_is_not_guessed(tmp_path: Path) -> None:
    both = {**LIVE, "prompt": "Ours?", "tests": [{"input": "", "output": ""}]}
    assert program_row(both, "").statement == "Ours?"
    assert program_row(both, "livecodebench").statement == "Add two numbers."
    with pytest.raises(ValueError, match='no column "input_output"'):
        program_row(both, "apps")

"""Questions from files: which rows are usable, the errors of the others, and how answers are compared."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from gspo.tasks.environments import RewardJob
from gspo_services.tasks.environments.dataset import Dataset, DatasetOptions
from gspo_services.tasks.environments.reward_pool import RewardPool
from gspo_services.tasks.environments.sources import MixedTasks
from tests.support.files.public_data import PUBLIC_DATA

GOOD = {"question": "1+1?", "answer": "one and one is #### 2"}


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_rows_come_in_the_files_order_with_the_answer_after_the_marker(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", GOOD, "", {"question": "2+3?", "answer": "#### 4 or rather #### 5"})
    source = Dataset(DatasetOptions(train_path=str(path))).tasks("train")
    assert source.num_tasks == 2
    assert [source.task(0), source.task(1)] == [
        {"prompt": "1+1?", "answer": "2", "answer_marker": "####"},
        {"prompt": "2+3?", "answer": "5", "answer_marker": "####"},
    ]
    with pytest.raises(IndexError):
        source.task(2)


def test_parquet_with_named_columns_is_read_like_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"problem": ["1+1?"], "solution": [2]}), path)
    options = DatasetOptions(eval_path=str(path), prompt_column="problem", answer_column="solution")
    assert Dataset(options).tasks("eval").task(0) == {"prompt": "1+1?", "answer": "2"}


def test_a_missing_number_of_a_parquet_file_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"question": ["x", "y"], "answer": [2.0, float("nan")]}), path)
    with pytest.raises(ValueError, match=r'row 2: column "answer" is nan'):
        Dataset(DatasetOptions(train_path=str(path), answer_marker="")).tasks("train")


BAD_ROWS = [
    ("{", "not JSON"),
    ("[1]", "a JSON object is needed, found list"),
    ({"prompt": "x"}, "there are prompt (answer_column says which to use)"),
    ({"question": None, "answer": "#### 1"}, 'column "question" is None'),
    ({"question": " ", "answer": "#### 1"}, 'column "question" is empty'),
    ({"question": "x", "answer": "1"}, "it is laid out as question and answer (question, answer)"),
    ({"question": "x", "answer": "so ####"}, 'column "answer" has no answer'),
]


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS)
def test_a_bad_row_stops_the_run_with_file_line_and_reason(tmp_path: Path, row: object, reason: str) -> None:
    path = write_lines(tmp_path / "bad.jsonl", GOOD, row)
    with pytest.raises(ValueError) as refusal:
        Dataset(DatasetOptions(train_path=str(path))).tasks("train")
    assert str(refusal.value).startswith(f"{path}, line 2: ")
    assert reason in str(refusal.value)
    assert 'on_bad_row = "skip"' in str(refusal.value)


def test_bad_rows_are_left_out_on_request(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "bad.jsonl", GOOD, *(row for row, _ in BAD_ROWS), {**GOOD, "question": "2+0?"})
    source = Dataset(DatasetOptions(train_path=str(path), on_bad_row="skip")).tasks("train")
    assert source.num_tasks == 2


def test_bytes_that_are_not_text_are_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"question": "\xff", "answer": "#### 1"}\n')
    with pytest.raises(ValueError, match=r"line 1: not JSON"):
        Dataset(DatasetOptions(train_path=str(path))).tasks("train")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.txt", b"x", "none of the files that can be read"),
        ("a.parquet", b"x", "not a Parquet file"),
        ("a.jsonl", b"", "no usable row"),
        ("", b"", "needs train_path"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    path = tmp_path / name
    if name:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=reason):
        Dataset(DatasetOptions(train_path=str(path) if name else "")).tasks("train")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no file .*gone\.jsonl: correct train_path"):
        Dataset(DatasetOptions(train_path=str(tmp_path / "gone.jsonl"))).tasks("train")
    with pytest.raises(ValueError, match="`hf download openai/gsm8k --repo-type dataset --local-dir data/gsm8k`"):
        Dataset(DatasetOptions(train_path="openai/gsm8k")).tasks("train")
    for no_hub in ("data/gsm8k", "rows/train.jsonl"):
        with pytest.raises(ValueError, match=r"environment\.options$"):
            Dataset(DatasetOptions(train_path=no_hub)).tasks("train")


def test_the_text_after_the_last_marker_is_judged_or_what_the_last_line_says() -> None:
    environment = Dataset(DatasetOptions(answer_marker="####"))
    state = environment.start({"prompt": "p", "answer": "5"}, seed=0).state
    jobs = [environment.step(state, action).reward for action in ("5 #### 4 #### 6", "7\nso 5")]
    assert all(isinstance(job, RewardJob) for job in jobs)
    assert [job.arguments["answer"] for job in jobs if isinstance(job, RewardJob)] == ["6", "5"]


def test_an_answer_of_the_file_is_taken_out_of_its_box(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"question": "q", "answer": "so it is $\\boxed{\\frac{1}{2}}$"})
    source = Dataset(DatasetOptions(train_path=str(path), answer_marker="")).tasks("train")
    assert source.task(0)["answer"] == "\\frac{1}{2}"


UNGRADABLE = ["\\text{}", "\\frac{1}{2", "proof", "\\text{ }", "**", "1}"]


def test_answers_that_grade_nothing_are_named_and_counted(tmp_path: Path) -> None:
    rows = [GOOD, *({"question": f"q{place}", "answer": f"#### {gold}"} for place, gold in enumerate(UNGRADABLE))]
    path = write_lines(tmp_path / "a.jsonl", *rows)
    with pytest.raises(ValueError, match=r"^6 answers cannot be graded:") as refusal:
        Dataset(DatasetOptions(train_path=str(path))).tasks("train")
    told = str(refusal.value).splitlines()
    assert told[1] == f"{path}, line 2: its answer '\\\\text{{}}' says nothing: correct it"
    assert told[2].startswith(f"{path}, line 3: its answer '\\\\frac{{1}}{{2' has braces that do not match")
    assert told[-2:] == ["and 1 more", 'Correct these rows, or set on_bad_row = "skip" to leave them out']
    # Such rows may be left out, and a reward of the user's own may make something of them.
    assert Dataset(DatasetOptions(train_path=str(path), on_bad_row="skip")).tasks("train").num_tasks == 1
    assert Dataset(DatasetOptions(train_path=str(path), reward="mine:grade")).tasks("train").num_tasks == 7


def test_tasks_that_come_later_are_checked_too(tmp_path: Path) -> None:
    source = Dataset(DatasetOptions(train_path=str(write_lines(tmp_path / "a.jsonl", GOOD)))).tasks("train")
    assert isinstance(source, MixedTasks)
    with pytest.raises(ValueError, match=r"b\.jsonl, line 1: its answer 'proof' stands for"):
        source.add(write_lines(tmp_path / "b.jsonl", {"question": "q", "answer": "#### proof"}))
    assert source.num_tasks == 1


async def test_gsm8k_loads_unchanged_and_its_own_answers_are_graded_right() -> None:
    train, test = PUBLIC_DATA / "gsm8k" / "train.jsonl", PUBLIC_DATA / "gsm8k" / "test.jsonl"
    if not (train.is_file() and test.is_file()):
        pytest.skip(f"no GSM8K files in {train.parent} (set GSPO_PUBLIC_DATA)")
    environment = Dataset(DatasetOptions(train_path=str(train), eval_path=str(test)))
    assert (environment.tasks("train").num_tasks, environment.tasks("eval").num_tasks) == (7473, 1319)
    source = environment.tasks("eval")
    start = environment.start(source.task(2), seed=0)
    assert start.messages[0]["role"] == "system"
    actions = {"#### 70000": 1.0, "The profit is $70,000.": 1.0, "#### 70001": 0.0, "no idea": 0.0}
    async with RewardPool() as pool:
        for action, reward in actions.items():
            step = environment.step(start.state, action)
            assert step.done
            assert isinstance(step.reward, RewardJob)
            result = await pool.grade(step.reward)
            assert (result.reward, result.failure) == (reward, None), action

"""Rows of every kind of file and folder, and what is said of one that cannot be used."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from gspo_services.tasks.environments import create_task_set
from gspo_services.tasks.environments.sources import rows_of
from tests.support.files.arrow import saved_dataset


def prompts_of(path: Path, **options: Any) -> list[Any]:
    options = {"answer_marker": "", **options}
    source = create_task_set("dataset", {"train_path": str(path), **options}).tasks("train")
    assert source.num_tasks is not None
    return [source.task(index)["prompt"] for index in range(source.num_tasks)]


def rows(*questions: str) -> list[dict[str, Any]]:
    return [{"question": question, "answer": "1"} for question in questions]


def test_a_folder_of_parquet_shards_is_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name, questions in (("train-00001-of-00002", ("c",)), ("train-00000-of-00002", ("a", "b")), (".half", ("x",))):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows(*questions)), tmp_path / f"{name}.parquet")
    (tmp_path / "README.md").write_text("about")
    assert prompts_of(tmp_path) == ["a", "b", "c"]


def test_a_folder_of_lines_is_read_likewise(tmp_path: Path) -> None:
    for name, question in (("2.jsonl", "b"), ("1.jsonl", "a")):
        (tmp_path / name).write_text(json.dumps(rows(question)[0]) + "\n")
    assert prompts_of(tmp_path) == ["a", "b"]


def test_a_dataset_that_save_to_disk_wrote_is_read_without_its_package(tmp_path: Path) -> None:
    saved_dataset(tmp_path / "set", rows("a", "b"), rows("c"))
    assert prompts_of(tmp_path / "set") == ["a", "b", "c"]
    places = [f"{row.path.name}, {row.place}" for row in rows_of(tmp_path / "set")]
    assert places == [f"data-0000{shard}-of-00002.arrow, row {row}" for shard, row in ((0, 1), (0, 2), (1, 1))]


def test_of_a_saved_dataset_the_split_is_read_or_one_is_to_be_named(tmp_path: Path) -> None:
    saved_dataset(tmp_path / "sets" / "train", rows("a"))
    (tmp_path / "sets" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert prompts_of(tmp_path / "sets") == ["a"]
    (tmp_path / "sets" / "dataset_dict.json").write_text('{"splits": ["easy", "hard"]}')
    with pytest.raises(ValueError, match=r"holds several splits: name one of them, .*/sets/easy or .*/sets/hard"):
        prompts_of(tmp_path / "sets")
    assert prompts_of(tmp_path / "sets" / "train") == ["a"]


def a_missing_shard(folder: Path) -> str:
    (folder / "data-00001-of-00002.arrow").unlink()
    return r"names data-00001-of-00002.arrow, which is not there: copy the whole folder"


def a_torn_shard(folder: Path) -> str:
    path = folder / "data-00001-of-00002.arrow"
    path.write_bytes(path.read_bytes()[:200])
    return r"data-00001-of-00002.arrow is not a whole Arrow file"


def a_broken_state(folder: Path) -> str:
    (folder / "state.json").write_text('{"_data_files": [{}]}')
    return r"state.json is not what save_to_disk writes"


@pytest.mark.parametrize("damage", [a_missing_shard, a_torn_shard, a_broken_state])
def test_a_saved_dataset_that_is_not_whole_is_refused(tmp_path: Path, damage: Any) -> None:
    saved_dataset(tmp_path / "set", rows("a", "b"), rows("c"))
    message = damage(tmp_path / "set")
    with pytest.raises(ValueError, match=message):
        prompts_of(tmp_path / "set")


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the folder .* holds no file that can be read"):
        prompts_of(tmp_path)


def test_a_column_inside_another_is_named_with_a_dot(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    row = {"problem": {"text": "1+1?", "parts": [{"answer": "2"}]}, "a.b": "dotted"}
    path.write_text(json.dumps(row) + "\n")
    columns = {"prompt_column": "problem.text", "answer_column": "problem.parts.0.answer"}
    assert prompts_of(path, **columns, task_columns=["a.b"]) == ["1+1?"]
    with pytest.raises(ValueError, match=r'line 1: no column "problem.title": there are parts, text in "problem"'):
        prompts_of(path, **columns | {"prompt_column": "problem.title"})


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]


def test_a_prompt_may_be_a_conversation(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    sharegpt = [{"from": "human", "value": "2+2?"}]
    path.write_text("".join(json.dumps({"question": chat, "answer": "2"}) + "\n" for chat in (CHAT, sharegpt)))
    environment = create_task_set("dataset", {"train_path": str(path), "answer_marker": "", "system_prompt": "Solve."})
    source = environment.tasks("train")
    first, second = (environment.start(source.task(index), 0).messages for index in (0, 1))  # type: ignore[attr-defined]
    assert first == CHAT, "its own system message"
    assert second == [{"role": "system", "content": "Solve."}, {"role": "user", "content": "2+2?"}]


@pytest.mark.parametrize(
    ("chat", "reason"),
    [
        ([{"role": "user"}], r"message 0 is .*: expected an object with role and content"),
        ([{"role": "robot", "content": "x"}], "has the role 'robot'"),
        ([{"role": "user", "content": ""}], "has the content ''"),
        ([{"role": "assistant", "content": "2"}], "ends with an answer"),
        ([], "an empty conversation"),
    ],
)
def test_a_conversation_that_asks_nothing_is_a_bad_row(tmp_path: Path, chat: Any, reason: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"question": chat, "answer": "2"}) + "\n")
    with pytest.raises(ValueError, match=rf'line 1: column "question".*{reason}'):
        prompts_of(path)

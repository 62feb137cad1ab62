"""Several sources, filters and identities: what is refused names file, row and the way out."""

import json
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from gspo.tasks.environments import Task
from gspo_services.tasks.environments import create_task_set
from gspo_services.tasks.environments.sources import MixedTasks, RowPlace, TaskReading


def written(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(number: int, **more: Any) -> dict[str, Any]:
    return {"question": f"{number}?", "answer": str(number), **more}


def tasks_of(**options: Any) -> MixedTasks:
    source = create_task_set("dataset", {"answer_marker": "", **options}).tasks("train")
    assert isinstance(source, MixedTasks)
    return source


def answers(source: MixedTasks) -> list[Any]:
    return [source.task(index)["answer"] for index in range(source.num_tasks)]


def test_several_sources_are_one_after_another_with_their_weights(tmp_path: Path) -> None:
    easy, hard = written(tmp_path / "easy.jsonl", row(1), row(2)), written(tmp_path / "b.jsonl", row(3))
    source = tasks_of(sources=[{"path": str(easy)}, {"path": str(hard), "weight": 3, "name": "hard"}])
    assert answers(source) == ["1", "2", "3"]
    assert source.parts == (("easy", 1.0, 2), ("hard", 3.0, 1))


@pytest.mark.parametrize("weight", [0, -1])
def test_a_source_that_would_never_be_sampled_is_named(tmp_path: Path, weight: float) -> None:
    path = written(tmp_path / "a.jsonl", row(1))
    with pytest.raises(ValueError, match=rf"the source {path} has the weight {weight}: no task of it would ever be sampled"):
        tasks_of(sources=[{"path": str(path), "weight": weight}])


def test_sources_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    first, second = written(tmp_path / "a.jsonl", row(1)), written(tmp_path / "other" / "a.jsonl", row(2))
    with pytest.raises(ValueError, match='two sources are called "a": give one of them another name'):
        tasks_of(sources=[{"path": str(first)}, {"path": str(second)}])
    with pytest.raises(ValueError, match="put train_path among the sources"):
        tasks_of(sources=[{"path": str(first)}], train_path=str(second))


def test_the_same_row_again_is_one_task_and_is_counted(tmp_path: Path) -> None:
    first, second = written(tmp_path / "a.jsonl", row(1), row(2), row(1)), written(tmp_path / "b.jsonl", row(3), row(2))
    with capture_logs() as logs:
        source = tasks_of(sources=[{"path": str(first)}, {"path": str(second)}])
    assert answers(source) == ["1", "2", "3"]
    assert (source.num_repeated, source.parts) == (2, (("a", 1.0, 2), ("b", 1.0, 1)))
    assert [each["num_repeated"] for each in logs if each["event"] == "dataset_loaded"] == [1, 1]
    with pytest.raises(ValueError, match=r"b\.jsonl has no usable row \(0 skipped, 1 there already\)"):
        tasks_of(sources=[{"path": str(first)}, {"path": str(written(tmp_path / "b.jsonl", row(2)))}])


@pytest.mark.parametrize(
    ("one", "other", "is_one"),
    # What the grader takes for the same is the same task.
    [("7", "007", True), ("1,000", "1000", True), ("1/2", r"\frac{1}{2}", True), ("x+1", "$1 + x$", True),
     ("Paris", "paris", True),
     (["1/2", "2"], ["2", "0.5", "2.0"], True), ("7", "8", False), ("x", "y", False),
     (["1/2", "2"], "2", False), ("1/0", "2/0", False)],
)  # fmt: skip
def test_rows_that_ask_the_same_and_answer_otherwise_contradict_each_other(
    tmp_path: Path, one: str | list[str], other: str | list[str], is_one: bool
) -> None:
    path = written(tmp_path / "a.jsonl", {"question": "Q?", "answer": one}, row(1), {"question": "Q?", "answer": other})
    if is_one:
        source = tasks_of(train_path=str(path))
        assert (answers(source), source.num_repeated) == ([one, "1"], 1)
        return
    with pytest.raises(ValueError) as refusal:
        tasks_of(train_path=str(path))
    assert str(refusal.value).startswith(
        f"{path}, line 3: its answer is {other!r}, and the row at {path}, line 1 asks the same"
    )
    assert f"answers {one!r}: correct or remove one of them. Correct the row, or set on_bad_row" in str(refusal.value)
    assert answers(tasks_of(train_path=str(path), on_bad_row="skip")) == [one, "1"]


def test_answers_are_compared_only_where_one_question_has_two_spellings_of_it(tmp_path: Path) -> None:
    compared = list[tuple[object, object]]()

    def same(one: object, other: object) -> bool:
        compared.append((one, other))
        return True

    def task(record: dict[str, Any], where: RowPlace) -> tuple[Task, int]:
        return {"prompt": record["question"], "answer": record["answer"]}, 0

    tasks = MixedTasks(TaskReading(task, same_answer=same))
    tasks.add(written(tmp_path / "a.jsonl", row(1), row(2), row(2, note="again"), row(1) | {"answer": "1.0"}))
    assert (tasks.num_tasks, compared) == (2, [("1", "1.0")])


def test_an_identity_is_the_column_for_it_or_the_content(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", row(1, uid="x"), row(1, uid="y"), row(1, uid="y"))
    assert tasks_of(train_path=str(path)).num_tasks == 1
    source = tasks_of(train_path=str(path), id_column="uid")
    assert [source.identity(index) for index in range(source.num_tasks)] == ["x", "y"]
    by_content = tasks_of(train_path=str(written(tmp_path / "b.jsonl", row(5))))
    assert by_content.identity(0) == tasks_of(train_path=str(written(tmp_path / "c.jsonl", row(5)))).identity(0)
    with pytest.raises(ValueError, match='line 1: column "uid" is None: an identity is text or a whole number'):
        tasks_of(train_path=str(written(tmp_path / "d.jsonl", row(1, uid=None))), id_column="uid")
    twice = written(tmp_path / "e.jsonl", row(1, uid="x"), row(2, uid="x"))
    with pytest.raises(ValueError, match=r'line 2: it has the identity "x" of the task at .*line 1, which is another'):
        tasks_of(train_path=str(twice), id_column="uid")
    assert answers(tasks_of(train_path=str(twice), id_column="uid", on_bad_row="skip")) == ["1"]


def test_rows_are_filtered_by_length_and_by_earlier_pass_rate(tmp_path: Path) -> None:
    rates = [0.0, 0.01, 0.5, 0.99, 1.0]
    path = written(
        tmp_path / "a.jsonl", *(row(number, stats={"rate": rate}) for number, rate in enumerate(rates)), row(12345)
    )
    bounds = {"pass_rate_column": "stats.rate", "min_pass_rate": 0.01, "max_pass_rate": 0.99, "max_chars": 5}
    assert answers(tasks_of(train_path=str(path), filter=bounds)) == ["1", "2", "3"]
    assert answers(tasks_of(train_path=str(path), filter={"min_chars": 6})) == ["12345"]
    with pytest.raises(ValueError, match=r"no usable row \(0 skipped, 6 outside the filter\)"):
        tasks_of(train_path=str(path), filter={"min_chars": 60})


@pytest.mark.parametrize(
    ("bounds", "reason"),
    [
        ({"min_chars": 3, "max_chars": 2}, "no row would be left"),
        ({"pass_rate_column": "r", "min_pass_rate": 0.5, "max_pass_rate": 0.4}, "no row would be left"),
        ({"min_pass_rate": 0.5}, "need pass_rate_column"),
        ({"pass_rate_column": "answer"}, "line 1: column \"answer\" is '1': expected a share from 0 to 1"),
    ],
)
def test_a_filter_that_cannot_be_meant_is_refused(tmp_path: Path, bounds: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        tasks_of(train_path=str(written(tmp_path / "a.jsonl", row(1))), filter=bounds)


def test_held_out_rows_are_not_filtered(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", row(1))
    environment = create_task_set("dataset", {"answer_marker": "", "eval_path": str(path), "filter": {"min_chars": 60}})
    assert environment.tasks("eval").num_tasks == 1


def test_tasks_can_be_added_and_nothing_is_if_one_is_bad(tmp_path: Path) -> None:
    source = tasks_of(train_path=str(written(tmp_path / "a.jsonl", row(1))))
    before = source.digest
    with pytest.raises(ValueError, match=r"b\.jsonl, line 3: its answer is '9'"):
        source.add(written(tmp_path / "b.jsonl", row(2), row(4), row(1) | {"answer": "9"}))
    assert (answers(source), source.digest) == (["1"], before)
    assert source.add(written(tmp_path / "b.jsonl", row(2), row(1), row(3), row(4) | {"answer": "5"})) == 3
    assert answers(source) == ["1", "2", "3", "5"]
    source = tasks_of(train_path=str(written(tmp_path / "a.jsonl", row(1))))
    assert source.add(written(tmp_path / "b.jsonl", row(2), row(3))) == 2
    assert answers(source) == ["1", "2", "3"]
    assert source.digest != before


def test_a_repeated_row_is_not_read_again_also_in_another_file(tmp_path: Path) -> None:
    read = list[str]()

    def task(record: dict[str, Any], where: RowPlace) -> tuple[Task, int]:
        read.append(record["question"])
        return record, 0

    tasks = MixedTasks(TaskReading(task))
    tasks.add(written(tmp_path / "a.jsonl", row(1), row(1), row(2)))
    tasks.add(written(tmp_path / "b.jsonl", row(2), row(3)))
    assert read == ["1?", "2?", "3?"]
    with pytest.raises(ValueError, match="there already"):
        tasks.add(written(tmp_path / "c.jsonl", row(1), row(3)))

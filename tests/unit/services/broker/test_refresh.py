"""Tasks are added from files while a run goes on: whole files only, each once, and as they were after a restart."""

from pathlib import Path
from typing import Any

import pytest

from gspo.tasks.environments import Task
from gspo_services.broker.ledger import AddedTasks, SourceShare
from gspo_services.broker.refresh import INCOMING, REFUSED, Refresh, read_additions
from gspo_services.broker.rows import ADDED_DIRECTORY, AdditionRow, GroupRow
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.tasks.environments import MixedTasks, create_task_set
from tests.support.broker.ledger import LEARNER, LedgerHarness, config_with
from tests.support.broker.ledger_training import R1, generate
from tests.support.files.written import written
from tests.support.processes.small_disk import small_disk


def tasks_of(directory: Path, **sources: tuple[int, ...]) -> MixedTasks:
    named = sources or {"first": (0, 1)}
    options: dict[str, Any] = {
        "answer_marker": "",
        "sources": [{"path": str(written(directory / f"{name}.jsonl", *rows))} for name, rows in named.items()],
    }
    tasks = create_task_set("dataset", options).tasks("train")
    assert isinstance(tasks, MixedTasks)
    return tasks


def looked(refresh: Refresh) -> AddedTasks | None:
    """Two looks: a file that stands still is taken at the second. What cannot be added is refused as in a run."""
    assert refresh._next_file() is None
    path = refresh._next_file()
    if path is None:
        return None
    return refresh._added_or_refused(path)


def row_of(number: int, added: AddedTasks, at_draw: int = 0) -> AdditionRow:
    return AdditionRow(number=number, at_draw=at_draw, **vars(added))


def test_a_file_that_stands_still_is_copied_and_its_tasks_follow_the_others(tmp_path: Path) -> None:
    tasks = tasks_of(tmp_path)
    refresh = Refresh(tmp_path, tasks, ())
    written(tmp_path / INCOMING / "more.jsonl", 2, 3, 4)
    added = looked(refresh)
    assert added is not None
    assert (added.source, added.name, added.first_task, added.num_tasks) == ("first", "000001-more.jsonl", 2, 3)
    assert (tmp_path / ADDED_DIRECTORY / added.name).is_file()
    assert [tasks.task(index)["answer"] for index in range(tasks.num_tasks)] == ["0", "1", "2", "3", "4"]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    outside = written(tmp_path / "outside.jsonl", 7)
    refresh = Refresh(tmp_path, tasks_of(tmp_path), ())
    (tmp_path / INCOMING).mkdir(parents=True)
    (tmp_path / INCOMING / "more.jsonl").symlink_to(outside)
    assert looked(refresh) is None
    assert "is a link: links are not followed" in (tmp_path / REFUSED / "more.jsonl.reason.txt").read_text()
    assert outside.is_file()


def test_a_file_with_a_task_that_the_run_cannot_have_is_refused_and_adds_nothing(tmp_path: Path) -> None:
    def require(task: Task) -> None:
        if task["answer"] == "3":
            raise ValueError("it belongs to no adapter")

    tasks = tasks_of(tmp_path)
    written(tmp_path / INCOMING / "more.jsonl", 2, 3)
    assert looked(Refresh(tmp_path, tasks, (), require)) is None
    assert "line 2: it belongs to no adapter" in (tmp_path / REFUSED / "more.jsonl.reason.txt").read_text()
    assert tasks.num_tasks == 2


def test_a_file_that_still_grows_is_waited_for(tmp_path: Path) -> None:
    refresh = Refresh(tmp_path, tasks_of(tmp_path), ())
    path = written(tmp_path / INCOMING / "more.jsonl", 2)
    assert refresh._next_file() is None
    written(path, 2, 3)
    assert refresh._next_file() is None, "it has changed since"
    assert refresh._next_file() == path


def test_a_half_written_file_is_waited_for_by_name_and_taken_when_it_is_whole(tmp_path: Path) -> None:
    refresh = Refresh(tmp_path, tasks_of(tmp_path), ())
    path = written(tmp_path / INCOMING / "more.jsonl", 2, 3, end='\n{"question": "4')
    assert [refresh._next_file() for _ in range(4)] == [None] * 4
    assert refresh._unfinished == {path}
    written(path, 2, 3, 4)
    added = looked(refresh)
    assert added is not None
    assert added.num_tasks == 3


def test_names_that_begin_with_a_dot_are_not_there_yet(tmp_path: Path) -> None:
    refresh = Refresh(tmp_path, tasks_of(tmp_path), ())
    written(tmp_path / INCOMING / ".more.jsonl", 2)
    assert looked(refresh) is None


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("bad.jsonl", "{}\n", "bad.jsonl, line 1: no column question or"),
        ("again.jsonl", '{"question": "1?", "answer": "1"}\n', "again.jsonl has no usable row (0 skipped, 1 there already)"),
        ("half.parquet", "PAR1", "half.parquet is not a Parquet file"),
        ("other/a.jsonl", '{"question": "5?", "answer": "5"}\n', 'there is no source "other": the run has first'),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_name_and_adds_nothing(
    tmp_path: Path, name: str, text: str, reason: str
) -> None:
    tasks = tasks_of(tmp_path)
    path = tmp_path / INCOMING / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    assert looked(Refresh(tmp_path, tasks, ())) is None
    assert not path.exists()
    assert reason in (tmp_path / REFUSED / f"{path.name}.reason.txt").read_text()
    assert (tmp_path / REFUSED / path.name).read_text() == text
    assert tasks.num_tasks == 2
    assert not list((tmp_path / ADDED_DIRECTORY).glob("*"))


async def test_a_full_disk_makes_a_file_wait_whether_it_is_good_or_bad(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        tasks = tasks_of(disk.path)
        refresh = Refresh(disk.path, tasks, ())
        good = written(disk.path / INCOMING / "good.jsonl", *range(2, 600))
        bad = written(disk.path / INCOMING / "bad.jsonl", end="\n{}\n")
        for room in (0, 4096, 8192):
            disk.fill(room)
            for path in (good, bad) if not room else (good,):
                assert not await refresh._prepare(path)
                assert path.exists(), room
            assert not (disk.path / REFUSED / f"{good.name}.reason.txt").exists()
            assert [path.name for path in (disk.path / ADDED_DIRECTORY).glob("*")] == []
            disk.empty()
        assert tasks.num_tasks == 2
        assert await refresh._prepare(good)
        assert not await refresh._prepare(bad)
        assert (disk.path / REFUSED / "bad.jsonl.reason.txt").exists()
        assert tasks.num_tasks == 600


def test_a_broker_killed_before_it_removed_the_file_does_not_add_it_twice(tmp_path: Path) -> None:
    path = written(tmp_path / INCOMING / "more.jsonl", 2)
    added = looked(Refresh(tmp_path, tasks_of(tmp_path), ()))
    assert added is not None
    rows = [row_of(1, added)]
    tasks = tasks_of(tmp_path)
    read_additions(tmp_path, tasks, rows)
    assert looked(Refresh(tmp_path, tasks, rows)) is None
    assert not path.exists()
    assert not (tmp_path / REFUSED).exists(), "it is no mistake of anybody"
    assert tasks.num_tasks == 3


def test_a_broker_killed_before_the_ledger_had_it_adds_it_again(tmp_path: Path) -> None:
    written(tmp_path / INCOMING / "more.jsonl", 2)
    first = looked(Refresh(tmp_path, tasks_of(tmp_path), ()))
    assert first is not None
    assert looked(Refresh(tmp_path, tasks_of(tmp_path), ())) == first


def test_another_source_has_a_folder_of_its_name(tmp_path: Path) -> None:
    refresh = Refresh(tmp_path, tasks_of(tmp_path, easy=(0,), hard=(1,)), ())
    written(tmp_path / INCOMING / "hard" / "more.jsonl", 2)
    added = looked(refresh)
    assert added is not None
    assert (added.source, added.first_task) == ("hard", 2)


@pytest.mark.parametrize("damage", ["changed", "gone", "other base"])
def test_a_run_does_not_go_on_with_other_tasks_than_were_added(tmp_path: Path, damage: str) -> None:
    written(tmp_path / INCOMING / "more.jsonl", 2)
    added = looked(Refresh(tmp_path, tasks_of(tmp_path), ()))
    assert added is not None
    path = tmp_path / ADDED_DIRECTORY / added.name
    if damage == "changed":
        written(path, 3)
    elif damage == "gone":
        path.unlink()
    tasks = tasks_of(tmp_path, **({"first": (0, 1, 5)} if damage == "other base" else {}))
    with pytest.raises(ConfigurationError, match=r"000001-more\.jsonl .*put it back from a backup"):
        read_additions(tmp_path, tasks, [row_of(1, added)])


def test_the_ledger_gives_added_tasks_to_later_prompts_alone_and_the_same_after_a_restart() -> None:
    config = config_with(
        sources=(SourceShare(name="first", weight=1.0, num_tasks=3),), groups_per_batch=8, max_lag=3, num_batches=60
    )
    world = LedgerHarness(config)
    world.hello(LEARNER, "learner")
    world.hello(R1)
    world.publish(1, 0)
    generate(world, 8, 1)
    added = AddedTasks(source="first", name="000001-x", digest="d", first_task=3, num_tasks=2)
    world._carry_out(world.ledger.on_tasks_added(added), {})
    assert world.lines[-1] == {
        "event": "data_added", "number": 1, "source": "first", "name": "000001-x", "num_tasks": 2, "prompt": 4, "batch": 0,
    }  # fmt: skip
    tasks = [world.ledger.state.schedule.task_index(prompt) for prompt in range(30)]
    assert max(tasks[:4]) < 3
    assert set(tasks[4:14]) == set(range(5))
    world.restart()
    assert [world.ledger.state.schedule.task_index(prompt) for prompt in range(30)] == tasks
    world.hello(R1)
    generate(world, 12, 1)
    assert [row.task_index for row in world.store.rows(GroupRow, "ORDER BY group_id")] == tasks[:10]

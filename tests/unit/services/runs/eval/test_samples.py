"""The file of samples: durable, gone on from after a kill, and never mixed."""

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from gspo_services.runs.eval.samples import SampleFile, ScoredSample
from gspo_services.shared.runtime.errors import ConfigurationError
from tests.support.processes.small_disk import small_disk

HEADER: dict[str, Any] = {"model": {"identity": "a"}, "set": "aime"}


def sample(task: int, number: int = 0, reward: float | None = 1.0, **fields: Any) -> ScoredSample:
    end: Any = "failed" if reward is None else "done"
    return ScoredSample(task=task, sample=number, seed=7, task_digest="d", rating=None, end=end, reward=reward, **fields)


def test_samples_are_there_after_a_kill_in_the_middle_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a" / "aime.jsonl"
    with SampleFile(path, HEADER) as file:
        file.append(sample(0, engine_s=1.5))
        file.append(sample(1, engine_s=0.25))
    path.write_bytes(path.read_bytes() + b'{"task": 2, "sam')
    with SampleFile(path, HEADER) as file:
        assert sorted(file.samples) == [(0, 0), (1, 0)]
        assert file.engine_s == 1.75
        file.append(sample(2))
    lines = path.read_text().splitlines()
    assert [json.loads(line).get("task") for line in lines] == [None, 0, 1, 2]


def test_a_sample_that_found_no_room_spoils_none_that_does(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        path = disk.path / "aime.jsonl"
        with SampleFile(path, HEADER) as file:
            file.append(sample(0))
            disk.fill()
            with pytest.raises(OSError, match="No space left"):
                file.append(sample(1, answer="x" * 8192))
            assert sorted(file.samples) == [(0, 0)]
            file.append(sample(2))  # It fits into what the file has of its last page.
            disk.empty()
            file.append(sample(1))
        with SampleFile(path, HEADER) as file:
            assert sorted(file.samples) == [(0, 0), (1, 0), (2, 0)]


def test_the_newest_line_of_a_sample_counts_and_what_all_have_cost(tmp_path: Path) -> None:
    with SampleFile(tmp_path / "x.jsonl", HEADER) as file:
        file.append(sample(0, reward=None, failure="no room", engine_s=2.0))
        file.append(sample(0, reward=0.5, engine_s=1.0))
    with SampleFile(tmp_path / "x.jsonl", HEADER) as file:
        assert [each.reward for each in file.samples.values()] == [0.5]
        assert file.engine_s == 3.0


def test_samples_of_something_else_are_not_gone_on_from(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with SampleFile(path, HEADER) as file:
        file.append(sample(0))
    content = path.read_bytes()
    with pytest.raises(ConfigurationError, match=r'another model: it was .*"a".* now it is .*"b".* --out DIR'):
        SampleFile(path, {**HEADER, "model": {"identity": "b"}}).__enter__()
    assert path.read_bytes() == content


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with SampleFile(path, HEADER) as file:
        file.append(sample(0))
        file.append(sample(1))
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1].replace('"reward":1.0', '"reward":"high"'), lines[2]]) + "\n")
    with pytest.raises(ConfigurationError, match=r"x.jsonl, line 2: damaged: .*reward.* taken again"):
        SampleFile(path, HEADER).__enter__()
    path.write_text("no header\n")
    with pytest.raises(ConfigurationError, match="first line is not a sample header"):
        SampleFile(path, HEADER).__enter__()


def _hold(path: Path, held: Any, release: Any) -> None:
    with SampleFile(path, HEADER):
        held.set()
        release.wait()


def test_two_commands_do_not_write_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    context = multiprocessing.get_context("fork")
    held, release = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(path, held, release))
    holder.start()
    try:
        assert held.wait(20)
        with pytest.raises(ConfigurationError, match="another `gspo eval` is writing there"):
            SampleFile(path, HEADER).__enter__()
    finally:
        release.set()
        holder.join()

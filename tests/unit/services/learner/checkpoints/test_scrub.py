"""Checkpoints are read slowly while a run goes on, and what is damaged is said."""

import queue
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gspo.files import discard_directory
from gspo_services.learner.checkpoints.scrub import CheckpointScrub, damage_in
from tests.support.learner.resuming import (
    saved,
    truncated,
    with_a_flipped_bit,
    with_other_metadata,
    without_a_file,
    without_metadata,
)


def damages(root: Path) -> list[str]:
    return [text for text in damage_in(root) if text]


def test_whole_checkpoints_are_read_to_the_end_without_a_word(tmp_path: Path) -> None:
    assert damages(tmp_path / "nothing here") == []
    saved(tmp_path, 2, 4)
    assert list(damage_in(tmp_path)).count("") >= 4
    assert damages(tmp_path) == []


@pytest.mark.parametrize(
    "damage",
    [truncated, with_a_flipped_bit, without_a_file, without_metadata, with_other_metadata],
    ids=lambda each: each.__name__,
)
def test_each_damage_to_an_older_checkpoint_is_found_once_and_named(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    old, _ = saved(tmp_path, 2, 4)
    if damage is with_other_metadata:
        file = old / "checkpoint.json"
        file.write_text(file.read_text().replace('"batch_position": 2', '"batch_position": 3'))
    else:
        damage(old)
    (text,) = damages(tmp_path)
    assert str(old) in text


def test_a_checkpoint_that_is_removed_while_it_is_read_is_not_damaged(tmp_path: Path) -> None:
    (path,) = saved(tmp_path, 2)
    reading = damage_in(tmp_path)
    assert next(reading) == ""
    discard_directory(path)
    assert [text for text in reading if text] == []


def test_a_pass_reports_how_many_files_are_damaged_and_the_thread_ends_with_its_block(tmp_path: Path) -> None:
    old, new = saved(tmp_path, 2, 4)
    with_a_flipped_bit(old)
    without_a_file(new)
    reports: queue.Queue[int] = queue.Queue()
    with capture_logs() as logs, CheckpointScrub(tmp_path, reports.put, rest=0.0, every_s=0.01) as scrub:
        assert reports.get(timeout=30) == 2
        assert reports.get(timeout=30) == 2, "it begins again"
    assert not scrub._thread.is_alive()
    said = {line["damage"] for line in logs if line["event"] == "checkpoint_damage_found"}
    assert len(said) == 2
    assert all(line["way_out"] for line in logs)


def test_a_pass_that_is_stopped_reports_nothing(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    reports: queue.Queue[int] = queue.Queue()
    with CheckpointScrub(tmp_path, reports.put, every_s=3600.0):
        pass
    assert reports.empty()

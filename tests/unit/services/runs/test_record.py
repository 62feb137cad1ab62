"""metrics.jsonl is read around its damage."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from gspo_services.runs.record import NoRecord, number, read_record


def write(directory: Path, *lines: object, end: str = "") -> None:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (directory / "metrics.jsonl").write_text("".join(f"{text}\n" for text in texts) + end)


def batch(index: object, **fields: Any) -> dict[str, Any]:
    return {"event": "batch", "batch": index, "policy_version": 2, **fields}


def test_damaged_lines_are_counted_and_the_rest_is_read(tmp_path: Path) -> None:
    write(
        tmp_path,
        batch(0),
        "{not json",
        "[1, 2]",
        '{"no": "event"}',
        "[" * 5000,
        batch("one"),
        {"event": "eval", "batch": 0, "policy_version": 1, "eval/reward": "high"},
        {"event": "dropped", "group_id": 4},
        batch(1),
    )
    record = read_record(tmp_path)
    assert [row["batch"] for row in record.batches] == [0, 1]
    assert record.num_damaged == 6
    assert record.others == [{"event": "dropped", "group_id": 4}]


def test_bytes_that_are_not_text_cost_their_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(
        b'{"event": "batch", "batch": 0}\n\xff\xfe\x00\n{"event": "batch", "batch": 1}\n'
    )
    record = read_record(tmp_path)
    assert (len(record.batches), record.num_damaged) == (2, 1)


def test_a_line_that_is_being_written_is_not_damaged(tmp_path: Path) -> None:
    write(tmp_path, batch(0), end='{"event": "batch", "ba')
    record = read_record(tmp_path)
    assert (len(record.batches), record.num_damaged) == (1, 0)


def test_a_batch_that_was_trained_again_counts_once_as_it_was_last(tmp_path: Path) -> None:
    write(tmp_path, batch(1, loss=1.0), batch(0, loss=2.0), batch(1, loss=3.0))
    assert [(row["batch"], row["loss"]) for row in read_record(tmp_path).batches] == [(0, 2.0), (1, 3.0)]


def test_an_evaluation_of_which_no_task_finished_has_no_reward_and_is_not_damaged(tmp_path: Path) -> None:
    write(tmp_path, {"event": "eval", "batch": 0, "policy_version": 1, "eval/reward": None, "num_finished": 0})
    record = read_record(tmp_path)
    assert (record.evaluations, record.num_damaged) == ([], 0)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e300", "true", '"7"', "null", "[1]"])
def test_a_measure_that_cannot_be_reckoned_with_is_none(value: str, tmp_path: Path) -> None:
    write(tmp_path, f'{{"event": "batch", "batch": 0, "loss": {value}}}')
    (row,) = read_record(tmp_path).batches
    assert math.isnan(number(row, "loss"))


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoRecord, match="there is no such directory"):
        read_record(tmp_path / "nothing")
    with pytest.raises(NoRecord, match="the broker writes it when it starts"):
        read_record(tmp_path)
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(NoRecord, match="cannot be read"):
        read_record(tmp_path)

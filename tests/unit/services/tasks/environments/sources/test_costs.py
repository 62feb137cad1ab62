"""The cost of reading grows with the file and with nothing else: columns, rows, names, nested values, long lines."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from gspo_services.tasks.environments import create_environment
from gspo_services.tasks.environments.sources import READING, mixture, rows_of, table_rows

COLUMNS = 100_000
MOST_S = 6.0
"""Processor time: of what takes each column or row once, many times as much as it takes. Its square would be minutes."""
NAMES = [f"c{number}" for number in range(COLUMNS)]


def wide_csv(directory: Path) -> Iterator[Path]:
    yield _file(directory / "wide.csv", ",".join(NAMES), ",".join("1" * COLUMNS), ",".join("2" * COLUMNS))


def wide_csv_of_short_rows(directory: Path) -> Iterator[Path]:
    yield _file(directory / "short.csv", ",".join(NAMES), *("x" * COLUMNS))


def wide_json(directory: Path) -> Iterator[Path]:
    yield _file(directory / "wide.jsonl", *(json.dumps(dict.fromkeys(NAMES, number)) for number in range(2)))


def wide_parquet(directory: Path) -> Iterator[Path]:
    table = pyarrow.table({name: [1, 2] for name in NAMES[: COLUMNS // 25]})
    pyarrow.parquet.write_table(table, directory / "wide.parquet")
    yield directory / "wide.parquet"


def nested(directory: Path) -> Iterator[Path]:
    deep = "[" * 400 + "]" * 400
    yield _file(directory / "nested.jsonl", *(f'{{"a": {deep}, "b": {number}}}' for number in range(4000)))


def long_lines(directory: Path) -> Iterator[Path]:
    yield _file(directory / "long.jsonl", *(json.dumps({"prompt": "a" * (1 << 23)}) for _ in range(4)))


def quoted_lines(directory: Path) -> Iterator[Path]:
    yield _file(directory / "quoted.csv", "prompt,answer", '"' + "a\n" * 1_000_000 + '",1')


def many_shards(directory: Path) -> Iterator[Path]:
    for number in range(2000):
        (directory / f"train-{number:05}.jsonl").write_text("{}\n")
    (directory / "test-00000.jsonl").write_text("{}\n")
    yield directory


def _file(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    "made",
    [wide_csv, wide_csv_of_short_rows, wide_json, wide_parquet, nested, long_lines, quoted_lines, many_shards],
    ids=lambda made: made.__name__,
)
def test_each_column_and_each_row_is_looked_at_once(made: Callable[[Path], Iterator[Path]], tmp_path: Path) -> None:
    for path in made(tmp_path):
        began = time.process_time()
        assert sum(1 for _ in rows_of(path)) > 0
        assert time.process_time() - began < MOST_S


@pytest.mark.parametrize("made", [wide_csv, wide_csv_of_short_rows, wide_json], ids=lambda made: made.__name__)
def test_a_wide_file_without_the_column_is_refused_as_fast(made: Callable[[Path], Iterator[Path]], tmp_path: Path) -> None:
    for path in made(tmp_path):
        environment = create_environment("dataset", {"train_path": str(path), "prompt_column": "prompt"})
        began = time.process_time()
        with pytest.raises(ValueError, match=r"line \d: (no column answer or .* there are c0|it has 1 fields)") as caught:
            environment.tasks("train")
        assert time.process_time() - began < MOST_S
        assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(("rows", "columns"), [(2500, 1), (150, 20), (5, 1500), (0, 3)])
def test_tables_are_read_in_pieces_of_bounded_cells_and_nothing_is_left_out(
    rows: int, columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_rows, "CELLS_AT_ONCE", 1000)
    table = pyarrow.table({f"c{number}": pyarrow.array(range(rows), pyarrow.int64()) for number in range(columns)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    for name in ("a.parquet", "a.arrow"):
        found = list(rows_of(tmp_path / name))
        assert [row.record["c0"] for row in found] == list(range(rows))
        assert [row.place for row in found] == [f"row {number}" for number in range(1, rows + 1)]


def test_a_long_read_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mixture, "SAID_S", -1.0)
    path = _file(tmp_path / "a.jsonl", *(json.dumps({"question": f"{n}?", "answer": str(n)}) for n in range(3)))
    create_environment("dataset", {"train_path": str(path)}).tasks("train")
    said = [line for line in capsys.readouterr().out.splitlines() if READING in line]
    assert len(said) == 3
    assert "num_rows=2" in said[-1]

"""A gold means what its column's type says, in each kind of table."""

import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from gspo.tasks.grading import ending_of
from gspo_services.tasks.environments import create_environment


def parquet(path: Path, table: pa.Table) -> None:
    pyarrow.parquet.write_table(table, path)


def arrow(path: Path, table: pa.Table) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


def golds(column: pa.Array, path: Path) -> Any:
    table = pa.table({"question": [f"{place}?" for place in range(len(column))], "answer": column})
    (parquet if path.suffix == ".parquet" else arrow)(path, table)
    tasks = create_environment("dataset", {"train_path": str(path)}).tasks("train")
    return [tasks.task(place)["answer"] for place in range(len(column))]


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@pytest.mark.parametrize(
    ("column", "expected", "said"),
    [
        (pa.array([7], pa.int8()), "7", "7"), (pa.array([2**63], pa.uint64()), str(2**63), str(2**63)),
        (pa.array([0.1, None, 1e-3], pa.float32()), "0.1", "1/10"), (pa.array([0.5], pa.float16()), "0.5", "0.5"),
        (pa.array([0.1], pa.float64()), "0.1", "0.10"), (pa.array([7.0], pa.float64()), "7", "7"),
        (pa.array([Decimal("12.50")], pa.decimal128(10, 2)), "12.50", "12.5"),
        (pa.array([datetime.date(2020, 3, 5)]), "2020-03-05", "March 5, 2020"),
        (pa.array([datetime.datetime(2020, 3, 5)]), "2020-03-05", "5 March 2020"),
        (pa.array([datetime.time(10, 30)]), "10:30", "10:30"), (pa.array([True]), ["yes", "true"], "Yes"),
        (pa.array(["yes"]).dictionary_encode(), "yes", "yes"), (pa.array(["x+1"], pa.large_string()), "x+1", "1+x"),
        (pa.array([["2", "12"]]), ["2", "12"], "2"), (pa.array([[2, 12]]), ["2", "12"], "2"),
    ],
    ids=lambda value: str(getattr(value, "type", value))[:30],
)  # fmt: skip
def test_a_gold_of_each_type_is_what_it_was(suffix: str, column: pa.Array, expected: Any, said: str, tmp_path: Path) -> None:
    found, *_ = golds(column.filter(column.is_valid()), tmp_path / f"a{suffix}")
    assert found == expected
    assert ending_of(found if isinstance(found, str) else found[0], said, "symbolic") == "right"


@pytest.mark.parametrize("column", [pa.array([b"7"]), pa.array([datetime.timedelta(hours=2)]), pa.array([float("nan")])])
def test_a_gold_that_no_answer_says_is_refused(column: pa.Array, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'row 1: column "answer" is .*not a'):
        golds(column, tmp_path / "a.parquet")

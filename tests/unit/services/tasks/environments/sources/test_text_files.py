"""JSON Lines, JSON and CSV, packed or not, with byte-order marks; and what is said of files that are none."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from gspo_services.tasks.environments import create_task_set
from gspo_services.tasks.environments.sources import packing, row_at, rows_of, text_rows


def gzipped(data: bytes) -> bytes:
    """Packed without the time: every worker of the tests must collect the same cases."""
    return gzip.compress(data, mtime=0)


ROWS = [{"question": "1+1?", "answer": "2"}, {"question": 'é, or "so"\n2?', "answer": "4"}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
CSV = 'question,answer\n1+1?,2\n"é, or ""so""\n2?",4\n'.encode()
MARK = b"\xef\xbb\xbf"


def zstd(content: bytes) -> bytes:
    return bytes(pyarrow.compress(content, codec="zstd", asbytes=True))


def tasks(path: Path, **options: Any) -> list[Any]:
    source = create_task_set("rows", {"train_path": str(path), **options}).tasks("train")
    return [source.task(index) for index in range(source.num_tasks or 0)]


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", LINES),
        ("a.ndjson", LINES),
        ("a.JSONL", LINES),
        ("a.jsonl", MARK + LINES.replace(b"\n", b"\r\n")),
        ("a.jsonl.gz", gzipped(LINES)),
        ("a.jsonl.gz", gzipped(MARK + LINES[:20]) + gzipped(LINES[20:])),
        ("a.jsonl.zst", zstd(LINES)),
        ("a.json", json.dumps(ROWS).encode()),
        ("a.json", json.dumps(ROWS, indent=2).encode()),
        ("a.json", MARK + b"\n \n" + json.dumps(ROWS).encode()),
        ("a.json", json.dumps({"version": 1, "data": ROWS}).encode()),
        ("a.json", json.dumps({"data": ROWS}, indent=1).encode()),
        ("a.json", LINES),
        ("a.json.gz", gzipped(json.dumps(ROWS).encode())),
        ("a.csv", CSV),
        ("a.csv", MARK + CSV.replace(b"\n", b"\r\n").replace(b'so""\r\n', b'so""\n')),
        ("a.csv.gz", gzipped(CSV)),
        ("a.csv.zst", zstd(CSV)),
        ("a.tsv", CSV.replace(b"question,answer", b"question\tanswer").replace(b",2\n", b"\t2\n").replace(b",4", b"\t4")),
    ],
)
def test_the_same_rows_come_out_of_every_kind_of_text(tmp_path: Path, name: str, content: bytes) -> None:
    assert tasks(written(tmp_path / name, content)) == ROWS


def test_places_are_those_of_the_file(tmp_path: Path) -> None:
    assert [row.place for row in rows_of(written(tmp_path / "a.csv", b'a\n1\n\n"2\n3"\n4\n'))] == [
        "line 2",
        "line 4",
        "line 6",
    ]
    assert [row.place for row in rows_of(written(tmp_path / "a.json", b"[{}, {}]"))] == ["row 1", "row 2"]
    assert [row.place for row in rows_of(written(tmp_path / "b.json", b"\n{}\n{}"))] == ["line 2", "line 3"]
    assert row_at(tmp_path / "a.csv", 4) == {"a": "2\n3"}
    with pytest.raises(ValueError, match=r"a\.csv has no row 3"):
        row_at(tmp_path / "a.csv", 3)


def test_a_csv_file_is_text_and_keeps_its_zeros(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", b" id , reward_model.ground_truth\n007, 1e400\n")
    assert tasks(path) == [{"id": "007", "reward_model.ground_truth": " 1e400"}]


@pytest.mark.parametrize(
    ("content", "place", "reason"),
    [
        (b"a,b\n1,2\n3\n4,5\n", "line 3", r"it has 1 fields, and the first line names 2 \(a, b\): quote a field"),
        (b"a,b\n1,2\n3,4,5\n4,5\n", "line 3", "it has 3 fields"),
        (b"a,b\n1,2\n\xe9,1\n4,5\n", "line 3", "byte 0xe9 is not UTF-8"),
    ],
)
def test_a_bad_row_of_csv_is_named_or_left_out(tmp_path: Path, content: bytes, place: str, reason: str) -> None:
    path = written(tmp_path / "a.csv", content)
    with pytest.raises(ValueError, match=rf"a\.csv, {place}: {reason}"):
        tasks(path)
    assert tasks(path, on_bad_row="skip") == [{"a": "1", "b": "2"}, {"a": "4", "b": "5"}]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.csv", b"", r"is empty: expected a line with the names of the columns"),
        ("a.csv", b"a,b\n", r"has no usable row \(0 skipped\)"),
        ("a.csv", b"a, a\n1,2\n", r'two columns are called "a"'),
        ("a.csv", b"\xe9,b\n1,2\n", r"line 1: byte 0xe9 is not UTF-8"),
        ("a.csv", b'a,b\n1,"2\n3,4\n', r"a\.csv, line 2: not CSV \(unexpected end of data\): quote a field"),
        ("a.csv", b'a,b\n1,"2"3\n', r"line 2: not CSV"),
        ("a.csv", "a,b\n1,2\n".encode("utf-16"), r"a\.csv is UTF-16: save it as UTF-8"),
        ("a.csv", b"PK\x03\x04...", r"a zip archive or a workbook of Excel"),
        ("a.jsonl", gzipped(LINES), r"a\.jsonl is packed by gzip: add \.gz to its name"),
        ("a.jsonl", zstd(LINES), r"is packed by zstd: add \.zst to its name"),
        ("a.jsonl", b"PAR1xxxx", r"is a Parquet file: end its name with \.parquet"),
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", r"is a pointer of Git LFS"),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", r"is a pointer of Git LFS"),
        ("a.parquet.gz", b"x", r"is none of the files that can be read: \.jsonl, \.json, \.csv"),
        ("a.txt", b"x", r"is none of the files that can be read"),
        ("a.jsonl.gz", LINES, r"does not unpack \(Not a gzipped file"),
        ("a.jsonl.gz", gzipped(LINES)[:-12], r"a\.jsonl\.gz does not unpack \(.*\): it was cut short or damaged"),
        ("a.csv.gz", gzipped(CSV)[:30] + b"xxxxxxxx", r"does not unpack"),
        ("a.jsonl.zst", zstd(LINES)[:-8], r"a\.jsonl\.zst "),
        ("a.jsonl.gz", gzipped(gzipped(LINES)), r"is packed by gzip"),
        ("a.json", b"", r"is not JSON"),
        ("a.json", b"[{}, {]", r"a\.json is not JSON \(.*\): correct it"),
        ("a.json", b'[{"a": 1}', r"is not JSON"),
        ("a.json", b'"text"', r"holds no rows"),
        ("a.json", b'{\n"train": []\n}', r"holds no rows"),
        ("a.json", b"[]", r"has no usable row"),
        ("a.json", b"[1]", r"row 1: a JSON object is needed, found int"),
        ("a.json", b'[{"a": "\xff"}]', r"row 1: not JSON"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_way_out(
    tmp_path: Path, name: str, content: bytes, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason) as refusal:
        tasks(written(tmp_path / name, content))
    assert str(tmp_path / name) in str(refusal.value)


def test_what_a_packed_file_unpacks_to_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "FREE_UNPACKED_BYTES", 1 << 16)
    bomb = written(tmp_path / "a.jsonl.gz", gzipped(b"\n" * (1 << 19)))
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz unpacks to more than "):
        tasks(bomb)
    wide = written(tmp_path / "b.json.gz", gzipped(b"[" + b" " * (1 << 19) + b"{}]"))
    with pytest.raises(ValueError, match=r"b\.json\.gz unpacks to more than "):
        tasks(wide)
    assert len(tasks(written(tmp_path / "c.jsonl", b"\n" * (1 << 19) + LINES))) == 2, "a plain file is as large as it is"


def test_a_line_a_field_and_a_json_file_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MAX_LINE_BYTES", 1000)
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: it is longer than"):
        tasks(written(tmp_path / "a.jsonl", b'{"a": 1}\n' + b"x" * 1001))
    monkeypatch.setattr(text_rows, "MAX_JSON_BYTES", 100)
    with pytest.raises(ValueError, match=r"a\.json has more than .*, and \.json is read whole: write it as \.jsonl"):
        tasks(written(tmp_path / "a.json", b"[\n" + b" " * 200 + b"]"))


def test_a_quote_that_is_never_closed_does_not_take_in_the_file(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", b'a\n"1\n' + (b"x" * (1 << 20) + b"\n") * 17)
    with pytest.raises(ValueError, match=r"a\.csv, line 2: not CSV \(field larger than field limit"):
        tasks(path)

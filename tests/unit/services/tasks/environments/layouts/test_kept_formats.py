"""Tests that stay in their file are read again from every format that rows may have."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pytest

from gspo_services.tasks.environments import create_environment
from gspo_services.tasks.environments.layouts import KeptRows
from gspo_services.tasks.environments.programs import Problem


def large_row(seed: int) -> dict[str, Any]:
    """Tests that do not compress well."""
    rng = random.Random(seed)
    tests = [{"input": " ".join(str(rng.random()) for _ in range(4000)), "output": str(seed)} for _ in range(5)]
    return {"prompt": f"P{seed}", "tests": tests}


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    match path.name:
        case "a.jsonl":
            path.write_bytes(b"\xef\xbb\xbf" + lines)
        case "a.jsonl.gz":
            path.write_bytes(gzip.compress(b"\n" + lines))
        case "a.json":
            path.write_text(json.dumps(rows))
        case "a.arrow":
            table = pyarrow.Table.from_pylist(rows)
            with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
                stream.write_table(table)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.arrow"])
def test_large_tests_are_read_again_from_the_row_that_has_them(tmp_path: Path, name: str) -> None:
    rows = [large_row(seed) for seed in range(2)]
    source = create_environment("code", {"train_path": str(written(tmp_path / name, rows))}).tasks("train")
    kept = KeptRows()
    for index in (1, 0):
        problem = msgspec.convert(source.task(index)["problem"], Problem)
        assert problem.in_file is not None
        assert msgspec.to_builtins(kept.tests(problem.in_file)) == rows[index]["tests"]

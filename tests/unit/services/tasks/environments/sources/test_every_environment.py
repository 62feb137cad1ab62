"""Every environment of files mixes sources, filters, and knows a problem by its content, wherever it lies."""

import json
from pathlib import Path
from typing import Any

import pytest

from gspo_services.tasks.environments import create_environment
from gspo_services.tasks.environments.sources import MixedTasks

ROWS: dict[str, Any] = {
    "math": lambda n: {"problem": f"What is {n} + {n}?", "answer": str(2 * n)},
    "code": lambda n: {"prompt": f"Print {n}.", "tests": [{"input": "", "output": str(n)}]},
    "contest": lambda n: {"prompt": f"Print {n}.", "tests": [{"input": "", "output": str(n)}]},
    "dataset": lambda n: {"question": f"What is {n} + {n}?", "answer": f"#### {2 * n}"},
}


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("name", ROWS)
def test_sources_have_weights_and_their_tasks_identities(name: str, tmp_path: Path) -> None:
    few = written(tmp_path / "few.jsonl", [ROWS[name](n) for n in range(2)])
    many = written(tmp_path / "many.jsonl", [ROWS[name](n) for n in range(2, 7)])
    options = {"sources": [{"path": few, "weight": 3.0}, {"path": many}], "filter": {"max_chars": 1000}}
    tasks = create_environment(name, options).tasks("train")
    assert isinstance(tasks, MixedTasks)
    assert [(part.name, part.weight, part.num_tasks) for part in tasks.parts] == [("few", 3.0, 2), ("many", 1.0, 5)]
    moved = written(tmp_path / "moved.jsonl", [ROWS[name](n) for n in (6, 0)])
    elsewhere = create_environment(name, {"train_path": moved}).tasks("train")
    assert isinstance(elsewhere, MixedTasks)
    assert [elsewhere.identity(index) for index in (0, 1)] == [tasks.identity(6), tasks.identity(0)]
    written(tmp_path / "many.jsonl", [ROWS[name](0)])
    with pytest.raises(ValueError, match=r"many.jsonl has no usable row \(0 skipped, 1 there already\)"):
        create_environment(name, options).tasks("train")

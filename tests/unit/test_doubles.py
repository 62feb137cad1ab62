"""What stands in for a part of the project is one of few: at most three classes of each kind, by their names."""

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
KINDS: Final = ("Broker", "Clock", "Engine", "Environment", "Learner", "Ledger", "Rollout", "Sandbox", "Store")
MOST: Final = 3
MORE: Final = {"Engine": 2 * MOST, "Broker": 9}
"""A learner's engine and a rollout's are two kinds, and so are the brokers of both, of which there are still more."""
APART: Final = (
    "tests/simulation/", "tests/frameworks/", "tests/packaging/", "benchmarks/autoscaling/", "benchmarks/study/",
    "benchmarks/learner_step/",
)  # fmt: skip
"""Worlds of their own: parts of simulators, what other projects call so, and learners that train for real."""


def doubles_in(texts: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the classes of each kind, each with its file, of files with their texts."""
    found = defaultdict(list)
    for file, text in texts:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("Test"):
                for kind in KINDS:
                    if node.name.endswith(kind):
                        found[kind].append(f"{file}: {node.name}")
    return dict(found)


def texts() -> list[tuple[str, str]]:
    names = [
        (path.relative_to(ROOT).as_posix(), path) for top in ("tests", "benchmarks") for path in (ROOT / top).rglob("*.py")
    ]
    return [(name, path.read_text(encoding="utf-8")) for name, path in sorted(names) if not name.startswith(APART)]


def too_many(found: dict[str, list[str]]) -> dict[str, list[str]]:
    return {kind: classes for kind, classes in found.items() if len(classes) > MORE.get(kind, MOST)}


def test_few_classes_stand_in_for_a_part() -> None:
    found = doubles_in(texts())
    assert "tests/support/engines/scripted_engine.py: ScriptedEngine" in found["Engine"]
    assert too_many(found) == {}, "tell one of those in tests/support what to do, or use the real one"


def test_a_fourth_of_a_kind_is_found() -> None:
    planted = [(f"{name}.py", f"def test() -> None:\n    class {name}Store(Base): ...") for name in "ABCD"]
    assert too_many(doubles_in(planted[:3])) == {}
    assert too_many(doubles_in(planted)) == {"Store": ["A.py: AStore", "B.py: BStore", "C.py: CStore", "D.py: DStore"]}
    assert doubles_in([("a.py", "class TestStore: ...\nclass Storekeeper: ...")]) == {}

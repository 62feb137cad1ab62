"""docs/code.md: every place that the map of the code names exists, and no room of services is missing from it."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
MAP = (ROOT / "docs" / "code.md").read_text(encoding="utf-8")
PLACES = sorted(set(re.findall(r"`((?:protocol|gspo|services|tests|deploy|docs)/[^`\s]*)`", MAP)))


def names_in(path: Path) -> set[str]:
    """Every class, function, method and module-level name, dotted."""

    def walk(nodes: list[ast.stmt], prefix: str) -> set[str]:
        found = set()
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                found |= {prefix + node.name} | walk(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(prefix + node.name)
            elif isinstance(node, ast.Assign):
                found |= {prefix + target.id for target in node.targets if isinstance(target, ast.Name)}
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(prefix + node.target.id)
        return found

    return walk(ast.parse(path.read_text(encoding="utf-8")).body, "")


def objection(place: str) -> str:
    """What is wrong with a place; empty when it is there."""
    file, _, name = place.partition("::")
    path = ROOT / file
    if not (path.is_dir() if file.endswith("/") else path.is_file()):
        return f"{file} is not there"
    return f"{file} has no {name}" if name and name not in names_in(path) else ""


def test_every_place_that_the_map_names_is_there() -> None:
    assert len(PLACES) > 40
    assert [found for place in PLACES if (found := objection(place))] == []


def test_a_place_that_is_not_there_is_named() -> None:
    assert objection("services/nowhere.py") == "services/nowhere.py is not there"
    assert objection("services/nowhere/") == "services/nowhere/ is not there"
    assert objection("gspo/loss.py::no_such_loss") == "gspo/loss.py has no no_such_loss"
    assert objection("gspo/loss.py::gspo_loss") == ""


def test_every_room_of_services_is_on_the_map() -> None:
    rooms = {f"{path.parent.relative_to(ROOT)}/" for path in (ROOT / "services").rglob("__init__.py")} - {"services/"}
    # services/runs has no modules of its own.
    shown = {place for place in PLACES if place.startswith("services/") and place.endswith("/")}
    assert shown - {"services/"} == rooms - {"services/runs/"}

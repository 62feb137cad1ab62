"""Every test is run by `make test` or by a target of its own: a new folder or a new marker is not silently left out."""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PYTEST = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
MARKERS = {line.partition(":")[0] for line in PYTEST["markers"]}
DEFAULT = tuple(PYTEST["testpaths"])


def is_in(module: str, paths: tuple[str, ...]) -> bool:
    return any(module == path or module.startswith(f"{path}/") for path in paths)


@cache
def targets() -> dict[str, tuple[str, ...]]:
    """Paths that the Makefile gives to pytest, by the marker that it selects there."""
    found: dict[str, tuple[str, ...]] = {}
    for marker, arguments in re.findall(r"pytest -m (\w+)\b(.*)", MAKEFILE):
        found[marker] = found.get(marker, ()) + tuple(word for word in arguments.split() if word.startswith("tests/"))
    return found


def modules() -> list[str]:
    return [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").rglob("test_*.py"))]


def markers_in(node: ast.AST) -> Iterator[str]:
    """Registered markers that some code names."""
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and part.attr in MARKERS and ast.unparse(part.value) == "pytest.mark":
            yield part.attr


def is_named(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def markers_of_module(tree: ast.Module) -> set[str]:
    """Those that all its tests have."""
    marks = [node.value for node in tree.body if isinstance(node, ast.Assign) and is_named(node.targets[0], "pytestmark")]
    return {marker for mark in marks for marker in markers_in(mark)}


def left_out(module: str, source: str) -> str | None:
    """What is wrong with a test module: the reason why some of it is never run; None: all of it is."""
    if is_in(module, DEFAULT) and not any(f"pytest.mark.{marker}" in source for marker in MARKERS):
        return None  # As most of them are: reading them all takes seconds.
    tree = ast.parse(source)
    for marker in sorted(set(markers_in(tree))):
        if not is_in(module, targets().get(marker, ())):
            return f"{module}: no target in the Makefile runs `pytest -m {marker}` on it"
    if not is_in(module, DEFAULT) and not markers_of_module(tree):
        return f"{module} is neither in `testpaths` of pyproject.toml nor has it the marker of a target as its pytestmark"
    return None


def test_every_test_module_is_run_by_make_test_or_by_a_target() -> None:
    assert [reason for module in modules() if (reason := left_out(module, (ROOT / module).read_text("utf-8")))] == []


def test_make_test_leaves_out_the_registered_markers_and_no_others() -> None:
    (expression,) = re.findall(r"^UNMARKED := not \((.*)\)$", MAKEFILE, re.MULTILINE)
    assert set(expression.split(" or ")) == MARKERS == set(targets())


def test_make_test_runs_folders_that_exist() -> None:
    assert [path for path in DEFAULT if not any(module.startswith(f"{path}/") for module in modules())] == []


def test_what_nobody_runs_is_named_with_the_reason() -> None:
    unmarked = "def test_it(): ..."
    marked = "import pytest\n@pytest.mark.demo\ndef test_it(): ..."
    module_marked = "import pytest\npytestmark = [pytest.mark.demo, pytest.mark.timeout(9)]\ndef test_it(): ..."
    assert left_out("tests/unit/test_new.py", unmarked) is None
    assert left_out("tests/demo/test_new.py", module_marked) is None
    assert "neither in `testpaths`" in (left_out("tests/new/test_new.py", unmarked) or "")
    # One test of it has the marker: the target leaves out the others.
    assert "neither in `testpaths`" in (left_out("tests/demo/test_new.py", marked) or "")
    assert "runs `pytest -m demo`" in (left_out("tests/unit/test_new.py", marked) or "")

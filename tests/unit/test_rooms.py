"""The house keeps its shape: rooms are entered by their doors, nothing goes in a circle, no folder is a heap."""

import ast
import subprocess
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.support.modules import FOLDERS, ROOT, modules

MAX_FILES = 25
MAX_LINES = 600


@cache
def imports_of(module: str) -> tuple[tuple[str, str], ...]:
    """What a module imports from the three packages, wherever in its text: (module, name)."""
    found = []
    for node in ast.walk(ast.parse(modules()[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in FOLDERS:
            found += [(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names if alias.name.partition(".")[0] in FOLDERS]
    return tuple(found)


def room_of(module: str) -> str:
    """The package that holds a module; a package is its own room."""
    is_package = modules()[module].name == "__init__.py"
    return module if is_package else module.rpartition(".")[0]


def is_room(package: str) -> bool:
    """A folder of services whose modules are behind a door: not the wings, and not what everybody takes by the piece."""
    names = package.split(".")
    return names[0] == "gspo_services" and len(names) > 2 and package not in OPEN


OPEN = {
    "gspo_services.prepare.env_try",
    "gspo_services.runs.eval",
    "gspo_services.shared.runtime",
    "gspo_services.tasks.reward_worker",
    "gspo_services.tasks.worker",
}
"""Taken by the piece: a door would load what a command or a worker process must not wait for."""


def passes_by_the_door(importer: str, imported: str) -> bool:
    """Whether ``importer`` takes something out of a room that it is not in."""
    room = room_of(imported)
    return is_room(room) and imported != room and not (importer + ".").startswith(room + ".")


def test_other_rooms_import_from_a_rooms_door() -> None:
    by_the_window = [
        f"{importer} imports {imported}: take the name from {room_of(imported)}"
        for importer in modules()
        for imported, _ in imports_of(importer)
        if importer.startswith("gspo_services.") and imported in modules() and passes_by_the_door(importer, imported)
    ]
    assert by_the_window == []


def test_a_door_gives_only_what_its_own_room_has() -> None:
    strangers = [
        f"{room} exports from {imported}"
        for room, path in modules().items()
        if path.name == "__init__.py" and is_room(room)
        for imported, _ in imports_of(room)
        if not imported.startswith(room + ".")
    ]
    assert strangers == []


def circles(graph: Mapping[str, set[str]]) -> Iterator[tuple[str, ...]]:
    """The strongly connected components of more than one node (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(node: str) -> Iterator[tuple[str, ...]]:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                yield from visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                yield tuple(sorted(component))

    for node in sorted(graph):
        if node not in index:
            yield from visit(node)


def test_a_circle_is_found() -> None:
    assert list(circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}})) == [("b", "c")]


def test_no_modules_import_each_other_in_a_circle_not_even_for_types() -> None:
    graph: defaultdict[str, set[str]] = defaultdict(set)
    for importer in modules():
        for imported, name in imports_of(importer):
            target = f"{imported}.{name}" if f"{imported}.{name}" in modules() else imported
            # A package's lazy exports name its modules, which never import the package itself.
            graph[importer].add(target)
    assert list(circles(graph)) == []


def test_the_contract_about_torch_leaves_out_only_rooms_that_need_it() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    (held,) = (each["source_modules"] for each in contracts if "torch" in each["name"] and "before" not in each["name"])
    rooms = {".".join(name.split(".")[:3]) for name in modules() if name.startswith("gspo_services.")}
    left_out = {room for room in rooms if room.count(".") == 2 and not {room, room.rpartition(".")[0]} & set(held)}
    left_out = {room for room in left_out if not room.startswith("gspo_services.learner.")}
    assert left_out == {
        "gspo_services.prepare.dequantise",
        "gspo_services.prepare.env_try",
        "gspo_services.prepare.probe",
        "gspo_services.prepare.tiny_models",
        "gspo_services.runs.export",
        "gspo_services.runs.replay",
        "gspo_services.serve.__main__",
        "gspo_services.serve.training",
        "gspo_services.shared.sglang_cpu",
        "gspo_services.shared.sglang_patching",
        "gspo_services.shared.sglang_sums",
        "gspo_services.shared.torch_tiles",
        "gspo_services.tasks.reward_model",
    }


def test_no_two_public_classes_share_a_name() -> None:
    names = Counter(
        node.name
        for path in modules().values()
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_no_module_is_longer_than_a_reader_bears() -> None:
    lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in modules().items()}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_no_folder_is_a_heap_of_files() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    folders = Counter(str(Path(name).parent) for name in listed.stdout.splitlines() if (ROOT / name).exists())
    assert {folder: count for folder, count in folders.items() if count > MAX_FILES} == {}


def test_no_module_raises_inside_except_star() -> None:
    """Python 3.11 up to 3.11.3 wraps what is raised there in a group, which nobody above expects."""
    found = [
        f"{name}:{inner.lineno}"
        for name, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.TryStar)
        for handler in node.handlers
        for inner in ast.walk(handler)
        if isinstance(inner, ast.Raise) and inner.exc is not None
    ]
    assert found == []

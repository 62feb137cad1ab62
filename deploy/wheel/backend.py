"""The build backend: its wheel holds ``gspo``, ``gspo_services`` and ``gspo_protocol``.

In the checkout the last two are called ``services`` and ``protocol``. A user's own project often has packages of these
names, which would hide ours. So a wheel or sdist is built from a renamed copy in a fresh folder, where setuptools finds
nothing that an earlier build left behind. An editable installation uses the checkout as it is.

The copy is text with other names. ``renamed`` replaces a name only where it names one of our modules. ``leftovers`` then
reads the result as Python and finds what a replacement missed or should not have touched.
"""

import ast
import contextlib
import os
import re
import shutil
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

from setuptools import build_meta
from setuptools.build_meta import build_editable, prepare_metadata_for_build_editable

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

RENAMED: Final = {"services": "gspo_services", "protocol": "gspo_protocol"}
PACKAGES: Final = ("gspo", *RENAMED)
FILES: Final = ("README.md", "LICENSE")

Children = Mapping[str, frozenset[str]]
"""For each renamed package the modules and packages directly below it."""


class BuildError(Exception):
    """The copy would not work; the text names each place and the way out."""


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """What a wheel needs beyond ``requires`` in pyproject.toml: nothing."""
    return []


get_requires_for_build_sdist = get_requires_for_build_editable = get_requires_for_build_wheel


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Any = None) -> str:
    """Write the wheel's metadata, with the command and the entry points under the wheel's names."""
    metadata = os.path.abspath(metadata_directory)
    with _copy_as_working_directory():
        return build_meta.prepare_metadata_for_build_wheel(metadata, config_settings)


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """Build the wheel from a renamed copy. Raises: BuildError."""
    wheel = os.path.abspath(wheel_directory)
    metadata = None if metadata_directory is None else os.path.abspath(metadata_directory)
    with _copy_as_working_directory():
        return build_meta.build_wheel(wheel, config_settings, metadata)


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    """Build the sdist from a renamed copy, which setuptools can build by itself. Raises: BuildError."""
    sdist = os.path.abspath(sdist_directory)
    with _copy_as_working_directory():
        return build_meta.build_sdist(sdist, config_settings)


@contextlib.contextmanager
def _copy_as_working_directory() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="gspo-build-") as folder:
        write_copy(Path.cwd(), Path(folder))
        with contextlib.chdir(folder):
            yield


def write_copy(source: Path, target: Path) -> None:
    """Write the renamed project in ``source`` to ``target``. Raises: BuildError when a name cannot be renamed safely."""
    project_file = (source / "pyproject.toml").read_text(encoding="utf-8")
    data = tomllib.loads(project_file)["tool"]["setuptools"]["package-data"]
    children = {package: children_of(source / package) for package in RENAMED}
    problems: list[str] = []
    for package in PACKAGES:
        for path in sorted((source / package).rglob("*")):
            inside = path.relative_to(source / package)
            copy = target / RENAMED.get(package, package) / inside
            if path.suffix == ".py" and path.is_file():
                text = renamed(path.read_text(encoding="utf-8"), children)
                problems += [f"{package}/{inside.as_posix()}:{problem}" for problem in leftovers(text, children)]
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_text(text, encoding="utf-8")
            elif any(fnmatch(inside.as_posix(), pattern) for pattern in data.get(package, ())):
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
    if problems:
        raise BuildError("the modules cannot be renamed for the wheel:\n" + "\n".join(problems))
    for name in FILES:
        shutil.copyfile(source / name, target / name)
    text = project_of_copy(project_file, children)
    _require_targets(tomllib.loads(text)["project"], target)
    (target / "pyproject.toml").write_text(text, encoding="utf-8")


def children_of(package: Path) -> frozenset[str]:
    """The modules and packages directly below ``package``; a folder without a module is none."""
    modules = {path.stem for path in package.glob("*.py")} - {"__init__"}
    return frozenset(modules | {path.parent.name for path in package.glob("*/*.py")})


def renamed(text: str, children: Children) -> str:
    """``text`` of a Python or TOML file with the wheel's names for our modules.

    A name is replaced before one of its children (``services.broker``), in an import of the package itself, and at the
    start of a string that ends behind the dot or has a placeholder there (``f"services.{name}"``). An attribute
    (``self.protocol.codec``), a longer name (``my_services.broker``) and a path or host name stay.
    """
    for package, new in RENAMED.items():
        names = "|".join(map(re.escape, sorted(children[package])))
        child = rf"(?<![\w./-]){package}(?=\.(?:{names})(?!\w))"
        origin = rf"(?<=\bfrom ){package}(?= import\b)"
        start = rf"(?<=[\"']){package}(?=\.[{{\"'])"
        text = re.sub("|".join((child, origin, start)), new, text)
        whole = rf"(?m)((?:^|[;\"'])[ \t]*import ){package}(?=[ \t]*(?:$|[;#\"'\\]|as\b))"
        text = re.sub(whole, rf"\g<1>{new}", text)
    return text


def leftovers(text: str, children: Children) -> Iterator[str]:
    """What is wrong in a renamed module, each as "LINE: what, and the way out"."""
    tree = ast.parse(text)
    nodes = sorted((node for node in ast.walk(tree) if isinstance(node, ast.expr | ast.stmt)), key=lambda node: node.lineno)
    bound = {name for node in ast.walk(tree) for name in _bound_by(node)}
    for node in nodes:
        for name in _imported_by(node):
            if name.partition(".")[0] in RENAMED:
                yield f"{node.lineno}: imports {name}: write `from {name} import ...` on one line, with single spaces"
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _names_a_child(node.value, children):
            yield f"{node.lineno}: the text {node.value[:60]!r} names a module: write its name in one piece, without escapes"
        if isinstance(node, ast.Name) and node.id not in bound:
            former = next((package for package, new in RENAMED.items() if new == node.id), None)
            if former is not None:
                yield f"{node.lineno}: a variable called {former} has an attribute named like a module: rename the variable"
            elif node.id in RENAMED:
                yield f"{node.lineno}: {node.id} is used as a package: import the names that are used from it"


def _imported_by(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []


def _names_a_child(text: str, children: Children) -> bool:
    package, dot, rest = text.partition(".")
    found = re.match(r"\w*", rest)
    assert found is not None
    return package in children and bool(dot) and (not rest or found[0] in children[package])


def _bound_by(node: ast.AST) -> list[str]:
    """Names that ``node`` gives a value, in whatever scope."""
    if isinstance(node, ast.Name):
        return [] if isinstance(node.ctx, ast.Load) else [node.id]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(
        node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler | ast.MatchAs | ast.MatchStar
    ):
        return [node.name] if node.name else []
    return []


def project_of_copy(text: str, children: Children) -> str:
    """The pyproject.toml of the copy: the same project with renamed targets, built by setuptools alone."""
    # A line of an array begins with a quote, or with [ and a quote.
    tables = [table for table in re.split(r"(?m)^(?=\[+[a-z])", text) if table.startswith(("[project]", "[project."))]
    named = ("[project.scripts]", "[project.entry-points")
    project = "".join(renamed(table, children) if table.startswith(named) else table for table in tables)
    packages = [RENAMED.get(package, package) for package in PACKAGES]
    include = ", ".join(f'"{pattern}"' for package in packages for pattern in (package, f"{package}.*"))
    data = tomllib.loads(text)["tool"]["setuptools"]["package-data"]
    files = "\n".join(f"{RENAMED.get(package, package)} = {data[package]!r}" for package in PACKAGES if package in data)
    return (
        '[build-system]\nrequires = ["setuptools>=77"]\nbuild-backend = "setuptools.build_meta"\n\n'
        f"{project.rstrip()}\n\n"
        f"[tool.setuptools.packages.find]\ninclude = [{include}]\n\n"
        f"[tool.setuptools.package-data]\n{files}\n"
    )


def _require_targets(project: Mapping[str, Any], copy: Path) -> None:
    """Raises: BuildError when a command or an entry point names a module that the copy lacks."""
    groups = [project.get("scripts", {}), *project.get("entry-points", {}).values()]
    for name, target in (item for group in groups for item in group.items()):
        module = copy.joinpath(*target.partition(":")[0].split("."))
        if not (module.with_suffix(".py").is_file() or (module / "__init__.py").is_file()):
            raise BuildError(f"pyproject.toml: {name} = {target!r} names a module that is not there: correct it")

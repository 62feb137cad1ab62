"""Users import gspo alone: what they read, copy and get from ``gspo init`` does, and what is public says what it is."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from gspo_services.prepare.init.choices import Kind
from gspo_services.prepare.init.command import main as init
from tests.support.modules import modules
from tests.support.pages import PAGES, blocks, inline_code

ROOT = Path(__file__).parents[3]
USER_PROJECT = ROOT / "tests" / "packaging" / "user_project"
PUBLIC = re.findall(r"^\| `(gspo[\w.]*)` \|", (ROOT / "docs/releases.md").read_text(encoding="utf-8"), re.MULTILINE)
INNER = re.compile(r"(?:\b(?:import|from)|-m)\s+gspo_(?:services|protocol)\b|\bgspo_(?:services|protocol)[\w.]*:\w")
"""An import, a program, or a function as a configuration names it."""
DOORS = {
    "gspo.runs": ("msgspec", "services"),
    "gspo.tiny_models": ("transformers", "services,learner"),
    "gspo.tasks.environments": ("msgspec", "services"),
    "gspo.tasks.grading": ("mpmath", "datasets"),
    "gspo.tasks.judge": ("openai", "judge"),
}
"""A package of each module that needs some, and the extras that bring them."""


def code_of_page(page: Path) -> str:
    """Its blocks, sessions and code in lines."""
    shown = [re.sub(r"^(>>> |\.\.\. )", "", line) for block in blocks(pages=(page,)) for line in block.text.splitlines()]
    return "\n".join([*shown, *inline_code(page)])


def code_of(folder: Path) -> dict[str, str]:
    """The Python files and configurations of a folder by their names."""
    return {str(path): path.read_text() for path in sorted(folder.rglob("*")) if path.suffix in (".py", ".toml", ".md")}


def for_users() -> dict[str, str]:
    """All code of ours that users read, copy or run."""
    pages = {str(page): code_of_page(page) for page in PAGES}
    return pages | code_of(ROOT / "examples") | code_of(USER_PROJECT)


def imports(code: str) -> Iterator[tuple[str, str]]:
    """The names that a text imports from gspo: (module, name)."""
    for module, names in re.findall(r"\bfrom (gspo(?:\.\w+)*) import (\([^)]*\)|[^\n#]*)", code):
        yield from ((module, name.split(" as ")[0].strip()) for name in names.strip("() ").split(",") if name.strip())


def objections(texts: dict[str, str]) -> list[str]:
    """Where these texts go around what is public."""
    inner = [f"{path}: {found}" for path, text in texts.items() for found in INNER.findall(text)]
    hidden = [
        f"{path}: {module}.{name} is not public"
        for path, text in texts.items()
        for module, name in imports(text)
        if module not in PUBLIC or name not in names_of(module)
    ]
    return inner + hidden


@cache
def body_of(module: str) -> list[ast.stmt]:
    return ast.parse(modules()[module].read_text(encoding="utf-8")).body


@cache
def names_of(module: str) -> list[str]:
    """What a module lists in ``__all__``."""
    for node in body_of(module):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def undocumented(module: str, name: str) -> list[str]:
    """What of a name, or of its methods, has no docstring; the name itself when the module does not have it."""
    body = body_of(module)
    for node, following in zip(body, [*body[1:], ast.Pass()], strict=True):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return [] if ast.get_docstring(node) else [name]
        if isinstance(node, ast.ClassDef) and node.name == name:
            parts = [node, *(each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))]
            bare = [part.name for part in parts if not part.name.startswith("_") and not ast.get_docstring(part)]
            return [f"{name}: {part}" for part in bare]
        if isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if ast.unparse(target) == name:
                says = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                return [] if says else [name]
    for each in (inner for node in body for inner in ast.walk(node)):
        if isinstance(each, ast.ImportFrom) and each.module:
            for alias in each.names:
                if (alias.asname or alias.name) == name:
                    return undocumented(each.module, alias.name)
    return [name]


def test_everything_that_users_read_and_copy_imports_what_is_public() -> None:
    texts = for_users()
    assert len(texts) > 40
    assert sum(1 for text in texts.values() for _ in imports(text)) > 25
    assert objections(texts) == []


@pytest.mark.parametrize("kind", get_args(Kind))
def test_a_new_project_imports_what_is_public(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert init([str(tmp_path / "new"), "--kind", kind, "--defaults"]) == 0
    capsys.readouterr()
    written = code_of(tmp_path / "new")
    assert any(path.endswith("run.toml") for path in written)
    assert objections(written) == []


def test_what_goes_around_the_door_is_found() -> None:
    assert objections({"a": "from gspo_services.runs.metrics import read_metrics"}) == ["a: from gspo_services"]
    assert objections({"a": "python -P -m gspo_services.learner"}) == ["a: -m gspo_services"]
    assert objections({"a": '"gspo_services.tasks.gym:score"'}) == ["a: gspo_services.tasks.gym:s"]
    assert objections({"a": "from gspo.tasks.agents import (\n    Episode,\n    Nobody,\n)"}) == [
        "a: gspo.tasks.agents.Nobody is not public"
    ]
    assert objections({"a": "from gspo.calibration import Measured"}) == ["a: gspo.calibration.Measured is not public"]


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_there_and_documented(module: str) -> None:
    assert ast.get_docstring(ast.Module(body_of(module), []))
    assert names_of(module) != []
    assert [found for name in names_of(module) for found in undocumented(module, name)] == []


@pytest.mark.parametrize("module", DOORS)
def test_without_its_packages_a_module_says_what_to_install(module: str) -> None:
    package, extras = DOORS[module]
    code = (
        f"import sys\nsys.modules[{package!r}] = None\nimport gspo\n"
        f"try:\n    import {module}\nexcept ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    said = f"{module} needs the package {package}, which is not installed here: pip install 'gspo[{extras}]'\n"
    assert done.stdout == said, done.stderr

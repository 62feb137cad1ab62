"""docs/gspo.md matches the code: its references exist, its examples run, and it names everything public."""

import ast
import doctest
import re
from pathlib import Path

import torch

import gspo

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "gspo.md").read_text(encoding="utf-8")
REFERENCE = re.compile(r"`([\w/]+\.py): ([\w.]+)`")
EXAMPLE = re.compile(r"```pycon\n(.*?)```", re.DOTALL)


def symbols(source: str) -> set[str]:
    """Names of a module's functions, classes and constants, and "Class.member" for methods and annotated fields."""
    found: set[str] = set()
    for node in ast.parse(source).body:
        names = _names(node)
        found |= names
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{member}" for inner in node.body for member in _names(inner)}
    return found


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.AnnAssign):
        return {node.target.id} if isinstance(node.target, ast.Name) else set()
    if isinstance(node, ast.Assign):
        return {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return set()


def test_every_symbol_that_the_page_refers_to_exists() -> None:
    references = REFERENCE.findall(PAGE)
    assert len(references) > 20
    for path, symbol in references:
        assert (ROOT / path).is_file(), f"{path}: no such file"
        assert symbol in symbols((ROOT / path).read_text(encoding="utf-8")), f"{path} has no {symbol}"


def test_the_examples_give_what_the_page_shows() -> None:
    examples = "\n".join(EXAMPLE.findall(PAGE))
    report: list[str] = []
    session = doctest.DocTestParser().get_doctest(examples, {}, "docs/gspo.md", None, 0)
    result = doctest.DocTestRunner().run(session, out=report.append)
    assert result.failed == 0, "".join(report)
    assert result.attempted == examples.count(">>> ") > 40


def test_the_page_names_everything_that_the_package_exports() -> None:
    assert [name for name in gspo.__all__ if f"`{name}`" not in PAGE and f": {name}`" not in PAGE] == []


def test_the_page_explains_every_diagnostic() -> None:
    """This includes groups, entropy and mismatch, which a summary has only when they were measured."""
    columns = len(gspo.SequenceStats.__dataclass_fields__)
    summary = gspo.summarise(gspo.SequenceStats.from_matrix(torch.ones(2, columns)))
    names = {key.split("/")[0] for key in summary}
    assert {"entropy", "mismatch_kl", "zero_advantage_groups"} <= names
    assert sorted(name for name in names if f"`{name}`" not in PAGE) == []

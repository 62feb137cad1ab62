"""Every promise about design, security, operations and faults names the test that shows it, and the test is there.

A footnote behind a paragraph, a bullet or a row of a table names tests: ``[^key]``, and at the end of the page
``[^key]: `tests/...::test_...` ``. One in the heading of a table holds for its rows. ``[^not-shown]``: nothing does.
Sections that explain, and promise nothing, are listed here.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EXPLAINS = {
    "docs/design.md": {"Words", "Limits", "How it is tested"},
    "docs/guide/security.md": {"Trusted", "Not defended", "Fuzzed"},
    "docs/guide/operations.md": set[str](),
    "docs/guide/faults.md": set[str](),
}
NOT_SHOWN = "not-shown"
_MARK = re.compile(r"\[\^([\w-]+)\]")
_DEFINITION = re.compile(r"^\[\^([\w-]+)\]:(.*)$", re.MULTILINE)
_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
_RULE = re.compile(r"^\|[-| :]+\|$")


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def units(text: str) -> Iterator[tuple[str, str]]:
    """The heading above it and the text of each paragraph, bullet and row. Code and footnotes are none."""
    heading, block, table = "", "", ""
    lines = [*_DEFINITION.sub("", text).splitlines(), ""]
    in_code = False
    for number, line in enumerate(lines):
        fence = line.lstrip().startswith("```")
        in_code ^= fence
        if in_code or fence:
            continue
        begins = line.startswith(("- ", "|", "#")) or not line.strip()
        if begins and block:
            yield heading, block + (table if block.startswith("|") else "")
            block = ""
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("|"):
            is_head = _RULE.match(lines[number + 1])
            table = "".join(f"[^{key}]" for key in _MARK.findall(line)) if is_head else table
            block = "" if is_head or _RULE.match(line) else line
        elif line.strip():
            block = f"{block} {line.strip()}".strip()


def promises(page: str) -> list[str]:
    return [unit for heading, unit in units(text_of(page)) if heading not in EXPLAINS[page] and not unit.endswith(":")]


def definitions(page: str) -> dict[str, str]:
    return dict(_DEFINITION.findall(text_of(page)))


@cache
def names_of_tests(file: str) -> set[str]:
    """Names of the tests in a file; empty without the file."""
    path = ROOT / file
    if not path.is_file():
        return set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {function.name for function in functions if function.name.startswith("test_")}


@pytest.mark.parametrize("page", EXPLAINS)
def test_every_promise_names_what_shows_it(page: str) -> None:
    bare = [promise for promise in promises(page) if not _MARK.search(promise)]
    assert bare == [], f"{page}: add [^key] and, at the end of the page, [^key]: `tests/...::test_...`; or [^{NOT_SHOWN}]"


@pytest.mark.parametrize("page", EXPLAINS)
def test_every_test_that_a_page_names_is_there(page: str) -> None:
    wrong = []
    for key, text in definitions(page).items():
        named = _TEST.findall(text)
        if not named and key != NOT_SHOWN:
            wrong.append(f"[^{key}] names no test")
        wrong += [
            f"[^{key}]: {file}::{name}"
            for file, name in named
            if not names_of_tests(file) or (name and name not in names_of_tests(file))
        ]
    assert wrong == []


@pytest.mark.parametrize("page", EXPLAINS)
def test_marks_and_footnotes_belong_together(page: str) -> None:
    marks = {key for _, unit in units(text_of(page)) for key in _MARK.findall(unit)}
    assert marks == definitions(page).keys()
    assert len(_DEFINITION.findall(text_of(page))) == len(definitions(page))


def test_the_sections_that_only_explain_are_there() -> None:
    for page, headings in EXPLAINS.items():
        assert headings <= {heading for heading, _ in units(text_of(page))}


def test_units_are_paragraphs_bullets_and_rows() -> None:
    text = "# A\nfirst\nof all[^a]\n\n- one\n  more\n- two\n\n"
    text += "| x | y[^b] |\n|---|---|\n| 1 | 2 |\n\n```toml\n# code\n```\n\n## B\nlast\n\n[^a]: `x`\n"
    assert list(units(text)) == [
        ("A", "first of all[^a]"), ("A", "- one more"), ("A", "- two"), ("A", "| 1 | 2 |[^b]"), ("B", "last"),
    ]  # fmt: skip
